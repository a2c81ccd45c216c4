//! Selection of the kernel and grid for a linear layer's GEMM on a GPU.
//!
//! A GEMM is divided into tiles, and several blocks may divide a tile's k (split-k). No simple rule predicts the
//! fastest choice for a shape, so it is looked up: `plan/*.csv` contains measurements (`examples/tune_linear.rs`
//! repeats them), and a shape uses the choice of the nearest measured shape.

use crate::storage::{Element, Precision};
use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// The GEMMs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Product {
    /// [`LinearForward`](crate::LinearForward): m = rows, n = outputs, k = inputs.
    Forward,
    /// [`LinearBackwardInput`](crate::LinearBackwardInput): m = rows, n = inputs, k = outputs.
    Input,
    /// [`LinearWeightGradient`](crate::LinearWeightGradient), and [`LinearUpdate`](crate::LinearUpdate) with master weights:
    /// m = outputs, n = inputs, k = rows.
    Gradient,
    /// [`LinearUpdate`](crate::LinearUpdate) without master weights: the same GEMM, which reads and writes the weights
    /// once.
    Update,
}

impl Product {
    /// Every GEMM.
    pub const ALL: [Product; 4] = [Product::Forward, Product::Input, Product::Gradient, Product::Update];

    /// Part of kernel names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Product::Forward => "forward",
            Product::Input => "input",
            Product::Gradient => "gradient",
            Product::Update => "update",
        }
    }

    /// Returns whether each operand is contiguous along k, the dimension that is summed over.
    pub(crate) const fn contiguous(self) -> (bool, bool) {
        match self {
            Product::Forward => (true, true),
            Product::Input => (true, false),
            Product::Gradient | Product::Update => (false, false),
        }
    }

    /// The tiles of its kernels on every GPU of compute capability 8.0 or newer.
    #[must_use]
    pub const fn tiles(self) -> &'static [Tile] {
        match self {
            Product::Forward | Product::Input => &[Tile::Thin16, Tile::Thin32, Tile::Thin64, Tile::Thin128, Tile::Wide],
            Product::Gradient | Product::Update => &[Tile::Fine, Tile::Flat, Tile::Slim, Tile::Wide],
        }
    }

    /// The additional tiles on compute capability 9.0, with tensor cores.
    #[must_use]
    pub const fn warpgroup_tiles(self, precision: Precision) -> &'static [Tile] {
        match (precision, self) {
            (Precision::F32, _) | (Precision::Tf32, Product::Input) => &[],
            (Precision::Tf32, _) => &[Tile::Warpgroup],
            (_, Product::Forward | Product::Input) => &[Tile::Warpgroup, Tile::WarpgroupThin],
            (_, Product::Gradient) => &[Tile::Warpgroup],
            (_, Product::Update) => &[Tile::Warpgroup, Tile::Streamed],
        }
    }
}

/// The part of C that one block computes, and how its warps divide it; see `cuda/linear.cu` and, for compute capability
/// 9.0, `cuda/linear_hopper.cu` and `cuda/linear_hopper_tf32.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tile {
    /// 32×16; eight warps divide k.
    Thin16,
    /// 32×32; eight warps divide k.
    Thin32,
    /// 32×64; eight warps divide k.
    Thin64,
    /// 32×128; two warps divide the columns, four divide k.
    Thin128,
    /// 128×128; eight warps tile it.
    Wide,
    /// 32×64; eight warps tile it.
    Fine,
    /// 64×128; eight warps tile it.
    Flat,
    /// 16×128; two warps divide the columns, four divide k.
    Slim,
    /// 128×128; two warpgroups with 64 rows each, or 64 columns each for the gradient in tf32. Compute capability 9.0.
    Warpgroup,
    /// 32×64, computed transposed by one warpgroup. Compute capability 9.0.
    WarpgroupThin,
    /// 128×128 weights, streamed through shared memory. Compute capability 9.0, at most 64 examples.
    Streamed,
}

/// Threads of a block. Blocks with warpgroups have one more warp, which issues TMA copies; with f32 in memory they have
/// two more warpgroups instead, which also prepare an operand.
pub(crate) const THREADS: u32 = 256;

/// Layout of a tile's kernel, with the constants of `cuda/linear.cu`.
struct Layout {
    rows: u64,
    cols: u64,
    /// Warps that divide k.
    slices: u64,
    /// Steps of k in one iteration of the main loop.
    depth: u64,
    stages: u64,
}

impl Tile {
    /// Every tile.
    pub const ALL: [Tile; 11] = [
        Tile::Thin16,
        Tile::Thin32,
        Tile::Thin64,
        Tile::Thin128,
        Tile::Wide,
        Tile::Fine,
        Tile::Flat,
        Tile::Slim,
        Tile::Warpgroup,
        Tile::WarpgroupThin,
        Tile::Streamed,
    ];

    /// Part of kernel names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Tile::Thin16 => "thin16",
            Tile::Thin32 => "thin32",
            Tile::Thin64 => "thin64",
            Tile::Thin128 => "thin128",
            Tile::Wide => "wide",
            Tile::Fine => "fine",
            Tile::Flat => "flat",
            Tile::Slim => "slim",
            Tile::Warpgroup => "warpgroup",
            Tile::WarpgroupThin => "warpgroup_thin",
            Tile::Streamed => "streamed",
        }
    }

    /// Returns true if it uses warpgroups and TMA, which need compute capability 9.0.
    #[must_use]
    pub const fn needs_warpgroups(self) -> bool {
        matches!(self, Tile::Warpgroup | Tile::WarpgroupThin | Tile::Streamed)
    }

    fn layout(self, element: Element) -> Layout {
        let in_bytes = |bytes: u64| bytes / element.bytes();
        let (rows, cols, slices, warp_depth, stages) = match self {
            Tile::Thin16 => (32, 16, 8, in_bytes(32), 4),
            Tile::Thin32 => (32, 32, 8, in_bytes(32), 4),
            Tile::Thin64 => (32, 64, 8, in_bytes(32), 4),
            Tile::Thin128 => (32, 128, 4, in_bytes(64), 4),
            Tile::Wide => (128, 128, 1, in_bytes(64), 4),
            Tile::Fine => (32, 64, 1, 32, 2),
            Tile::Flat => (64, 128, 1, 32, 2),
            Tile::Slim => (16, 128, 4, 16, 4),
            Tile::Warpgroup => (128, 128, 1, in_bytes(128), if element.bytes() == 4 { 4 } else { 3 }),
            Tile::WarpgroupThin => (32, 64, 1, 64, 14),
            // All of k in one iteration.
            Tile::Streamed => (128, 128, 1, 64, 1),
        };
        Layout { rows, cols, slices, depth: slices * warp_depth, stages }
    }
}

impl FromStr for Tile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|tile| tile.name() == text)
            .ok_or_else(|| format!("'{text}' is not a tile; use one of {}", Self::ALL.map(Tile::name).join(", ")))
    }
}

/// The tile of a GEMM, and the number of blocks that divide k.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Choice {
    /// Tile of a block.
    pub tile: Tile,
    /// Number of blocks that divide a tile's k (split-k).
    pub splits: u32,
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tile.name(), self.splits)
    }
}

/// Launch of one GEMM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) product: Product,
    pub(crate) precision: Precision,
    pub(crate) tile: Tile,
    /// Thread blocks.
    pub(crate) blocks: u64,
    /// Dynamic shared memory of a block.
    pub(crate) shared_bytes: u32,
    /// Iterations of a block's main loop.
    pub(crate) iterations: u64,
    /// Number of blocks that divide a tile's k (split-k).
    pub(crate) splits: u32,
    /// Bytes of workspace for the sums of split-k; a multiple of 4.
    pub(crate) workspace_bytes: u64,
    /// Number of counters of finished blocks, u32 each.
    pub(crate) tickets: u64,
    /// Replacement on a GPU without warpgroups, if this choice uses them. Workspace and tickets suffice for it, too.
    pub(crate) otherwise: Option<Choice>,
}

impl Plan {
    /// The measured choice for the nearest measured shape. Deterministic; takes a few nanoseconds for a shape that this
    /// thread has requested before.
    pub(crate) fn new(product: Product, precision: Precision, m: u32, n: u32, k: u32) -> Self {
        type Slot = Option<((Product, Precision, u32, u32, u32), Plan)>;
        const SLOTS: usize = 64;
        thread_local! {
            static CACHE: RefCell<[Slot; SLOTS]> = const { RefCell::new([None; SLOTS]) };
        }
        let key = (product, precision, m, n, k);
        let mixed = (product as u32) ^ m.rotate_left(3) ^ n.rotate_left(11) ^ k.rotate_left(20);
        // CAST: six bits of a product, which depend on all of the key except the precision.
        let slot = (mixed.wrapping_mul(0x9e37_79b1) >> 26) as usize % SLOTS;
        CACHE.with_borrow_mut(|cache| match cache[slot] {
            Some((cached_key, plan)) if cached_key == key => plan,
            _ => {
                let plan = Self::best(product, precision, [m, n, k]);
                cache[slot] = Some((key, plan));
                plan
            }
        })
    }

    fn best(product: Product, precision: Precision, shape: [u32; 3]) -> Self {
        let (choice, otherwise) = nearest(product, precision, shape);
        let plan = Self::with(product, precision, shape, choice);
        let Some(otherwise) = otherwise else { return plan };
        let other = Self::with(product, precision, shape, otherwise);
        Self {
            otherwise: Some(otherwise),
            workspace_bytes: plan.workspace_bytes.max(other.workspace_bytes),
            tickets: plan.tickets.max(other.tickets),
            ..plan
        }
    }

    /// The plan for GPUs without warpgroups.
    pub(crate) fn portable(&self, shape: [u32; 3]) -> Self {
        match self.otherwise {
            None => *self,
            Some(choice) => Self::with(self.product, self.precision, shape, choice),
        }
    }

    /// The plan for a given choice.
    pub(crate) fn with(product: Product, precision: Precision, [m, n, k]: [u32; 3], choice: Choice) -> Self {
        let element = precision.element();
        let layout = choice.tile.layout(element);
        let iterations = u64::from(k).div_ceil(layout.depth);
        // At most one block for each iteration of the loop.
        // CAST: at most `splits`, which is a u32.
        let splits = iterations.min(choice.splits.max(1).into()).max(1) as u32;
        let splits = if choice.tile == Tile::Streamed { 1 } else { splits };
        let tiles = u64::from(m).div_ceil(layout.rows) * u64::from(n).div_ceil(layout.cols);
        let (a_contiguous, b_contiguous) = product.contiguous();
        let strip = |lines: u64, contiguous: bool| {
            // 32-bit operands that the tensor cores read across their rows.
            let across = precision == Precision::Tf32 && !contiguous;
            let padding = if across { 32 } else { 16 };
            let (rows, row) = if contiguous { (lines, layout.depth) } else { (layout.depth, lines) };
            rows * (row * element.bytes() + padding)
        };
        let stages = layout.stages * (strip(layout.rows, a_contiguous) + strip(layout.cols, b_contiguous));
        let sums = layout.slices * layout.rows * (layout.cols + 8) * 4;
        // Swizzled tiles have no padding. Each stage has two mbarriers, and tiles are aligned to 1,024 bytes.
        let warpgroup = layout.stages * ((layout.rows + layout.cols) * layout.depth * element.bytes() + 16) + 1024;
        // For f32, one operand is prepared in slots next to the stages, each with two mbarriers. There are also two
        // sums for each row, and one word for a flag.
        let prepared = PREPARED * (layout.cols * layout.depth * element.bytes() + 16) + 2 * layout.rows * 4 + 8;
        let shared_bytes = match choice.tile {
            Tile::Warpgroup if element == Element::F32 => warpgroup + prepared,
            Tile::Warpgroup | Tile::WarpgroupThin => warpgroup,
            Tile::Streamed => STREAMED_ROOM + 4 * 16 + 1024,
            _ => stages.max(sums),
        };
        let is_split = splits > 1;
        // For f32 with warpgroups, split-k adds the sums in two levels: first groups of about sqrt(splits) blocks, then
        // the groups' sums.
        let tickets_each = match choice.tile {
            Tile::Warpgroup if element == Element::F32 => splits.div_ceil((splits - 1).isqrt() + 1) + 1,
            _ => 1,
        };
        let split_bytes = (layout.rows * layout.cols + layout.rows) * 4;
        Self {
            product,
            precision,
            tile: choice.tile,
            blocks: tiles.saturating_mul(splits.into()),
            // CAST: below 228 KiB for every layout, as a test checks.
            shared_bytes: shared_bytes as u32,
            iterations: iterations.div_ceil(splits.into()),
            splits,
            workspace_bytes: if is_split { tiles.saturating_mul(splits.into()).saturating_mul(split_bytes) } else { 0 },
            tickets: if is_split { tiles.saturating_mul(tickets_each.into()) } else { 0 },
            otherwise: None,
        }
    }

    /// Threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        match self.tile {
            Tile::WarpgroupThin => 128 + 32,
            Tile::Warpgroup if self.precision.element() == Element::F32 => 256 + 256,
            Tile::Warpgroup | Tile::Streamed => 256 + 32,
            _ => THREADS,
        }
    }

    /// Choices worth measuring for a shape: tiles that are not mostly empty, and numbers of splits that keep a GPU
    /// busy.
    pub(crate) fn candidates(product: Product, precision: Precision, [m, n, k]: [u32; 3]) -> Vec<Choice> {
        /// With more blocks than this, splitting k gains nothing.
        const MANY_BLOCKS: u64 = 600;
        let mut out = Vec::new();
        for &tile in product.tiles().iter().chain(product.warpgroup_tiles(precision)) {
            let layout = tile.layout(precision.element());
            let tiles = u64::from(m).div_ceil(layout.rows) * u64::from(n).div_ceil(layout.cols);
            let square = matches!(tile, Tile::Wide | Tile::Warpgroup);
            if square && m.min(n) < 64 && matches!(product, Product::Forward | Product::Input) {
                continue;
            }
            if tile == Tile::Streamed && !streams([m, n, k]) {
                continue;
            }
            for splits in [1, 2, 4, 8, 16, 18, 32, 37, 64, 128] {
                let iterations = u64::from(k).div_ceil(layout.depth);
                let useful = u64::from(splits) <= iterations && tiles * u64::from(splits) <= MANY_BLOCKS;
                if splits == 1 || (useful && tile != Tile::Streamed) {
                    out.push(Choice { tile, splits });
                }
            }
        }
        out
    }
}

/// Number of tiles of the prepared operand; `SLOTS` of `cuda/linear_hopper_tf32.cuh`.
const PREPARED: u64 = 3;

/// Shared memory of a streamed update's stages: three with 64 examples, four with 32.
const STREAMED_ROOM: u64 = 3 * 65_536;

/// Returns true if an update of this shape can stream: its examples fit into one stage, and its rows are multiples of
/// 16 bytes, because TMA writes complete 16-byte chunks.
pub(crate) fn streams([_, n, k]: [u32; 3]) -> bool {
    k <= 64 && n.is_multiple_of(8)
}

/// A line of the table: the fastest choice for one shape.
#[derive(Clone, Copy)]
struct TableLine {
    /// Logarithms of m, n and k.
    at: [f32; 3],
    choice: Choice,
}

/// Number of precisions with tables of their own: f32, tf32, 16 bits.
const KINDS: usize = 3;

/// Tables by product and kind of precision.
#[derive(Default)]
struct Tables {
    /// Every measured shape, for any GPU. Updates use the table of gradients.
    portable: [[Vec<TableLine>; KINDS]; 4],
    /// Shapes for which warpgroups are faster.
    warpgroup: [[Vec<TableLine>; KINDS]; 4],
}

const H200: &str = include_str!("plan/h200.csv");

fn kind(precision: Precision) -> usize {
    match precision {
        Precision::F32 => 0,
        Precision::Tf32 => 1,
        Precision::Bf16 | Precision::F16 => 2,
    }
}

fn logarithms(shape: [u32; 3]) -> [f32; 3] {
    shape.map(|size| (size as f32).log2())
}

/// One line: product, precision, m, n, k, tile, splits.
fn parse(line: &str) -> Option<(Product, usize, TableLine)> {
    let fields: Vec<&str> = line.split(',').collect();
    let [product, precision, m, n, k, tile, splits] = fields[..] else { return None };
    let product = Product::ALL.into_iter().find(|value| value.name() == product)?;
    let precision = Precision::ALL.into_iter().find(|value| value.name() == precision)?;
    let shape = [m.parse().ok()?, n.parse().ok()?, k.parse().ok()?];
    let choice = Choice { tile: tile.parse().ok()?, splits: splits.parse().ok()? };
    Some((product, kind(precision), TableLine { at: logarithms(shape), choice }))
}

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let mut tables = Tables::default();
        // The first line names the columns; a test parses all others.
        for (product, kind, line) in H200.lines().filter_map(parse) {
            let warpgroup = line.choice.tile.needs_warpgroups();
            let table = if warpgroup { &mut tables.warpgroup } else { &mut tables.portable };
            table[product as usize][kind].push(line);
            // The gradient's choices are valid for updates, too. The updates' own lines follow them.
            if product == Product::Gradient {
                table[Product::Update as usize][kind].push(line);
            }
        }
        tables
    })
}

/// The choice measured as fastest for this shape and, if it uses warpgroups, the fastest choice without them.
fn nearest(product: Product, precision: Precision, shape: [u32; 3]) -> (Choice, Option<Choice>) {
    let at = logarithms(shape);
    let distance = |line: &TableLine| line.at.iter().zip(at).map(|(a, b)| (a - b).abs()).sum::<f32>();
    let table = &tables().portable[product as usize][kind(precision)];
    let Some(portable) = table.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))) else {
        return (Choice { tile: product.tiles()[1], splits: 1 }, None);
    };
    // Searches from the end, so that an update's own line precedes that of the gradient.
    let fits = |tile: Tile| tile != Tile::Streamed || streams(shape);
    let table = &tables().warpgroup[product as usize][kind(precision)];
    match table.iter().rev().find(|line| line.at == portable.at && fits(line.choice.tile)) {
        None => (portable.choice, None),
        Some(faster) => (faster.choice, Some(portable.choice)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_lines_are_valid() {
        let (header, lines) = H200.split_once('\n').unwrap();
        assert_eq!(header, "product,precision,m,n,k,tile,splits");
        for line in lines.lines() {
            let (product, _, entry) = parse(line).unwrap_or_else(|| panic!("{line}"));
            let precision =
                Precision::ALL.into_iter().find(|value| line.contains(&format!(",{},", value.name()))).unwrap();
            let tile = &entry.choice.tile;
            assert!(product.tiles().contains(tile) || product.warpgroup_tiles(precision).contains(tile), "{line}");
        }
        for table in tables().portable.iter().flatten() {
            assert!(!table.is_empty());
        }
    }

    /// A tile that no shape uses would only enlarge every module.
    #[test]
    fn every_tile_is_the_fastest_for_some_shape() {
        let chosen: Vec<_> =
            H200.lines().filter_map(parse).map(|(product, kind, best)| (product, kind, best.choice.tile)).collect();
        for precision in Precision::ALL {
            for product in Product::ALL {
                // An update with any tile except the streamed one uses a gradient's kernel.
                let is_gradient = |tile| product == Product::Update && tile != Tile::Streamed;
                let kernel_product = |tile| if is_gradient(tile) { Product::Gradient } else { product };
                for &tile in product.tiles().iter().chain(product.warpgroup_tiles(precision)) {
                    assert!(
                        chosen.contains(&(kernel_product(tile), kind(precision), tile)),
                        "{product:?} {precision:?} {tile:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn listed_shape_uses_its_own_choice() {
        for line in H200.lines().skip(1) {
            let fields: Vec<&str> = line.split(',').collect();
            let [m, n, k] = [2, 3, 4].map(|field| fields[field].parse::<u32>().unwrap());
            let product = Product::ALL.into_iter().find(|value| value.name() == fields[0]).unwrap();
            let precision = Precision::ALL.into_iter().find(|value| value.name() == fields[1]).unwrap();
            let listed = parse(line).unwrap().2.choice;
            let (choice, otherwise) = nearest(product, precision, [m, n, k]);
            assert!([Some(choice), otherwise].contains(&Some(listed)), "{line}");
            let plan = Plan::new(product, precision, m, n, k);
            assert_eq!(plan.tile, choice.tile);
            let portable = plan.portable([m, n, k]);
            assert!(!portable.tile.needs_warpgroups());
            assert!(plan.workspace_bytes >= portable.workspace_bytes && plan.tickets >= portable.tickets);
        }
    }

    #[test]
    fn shared_memory_fits_a_multiprocessor_of_compute_capability_8() {
        for precision in Precision::ALL {
            for product in Product::ALL {
                for &tile in product.tiles().iter().chain(product.warpgroup_tiles(precision)) {
                    let plan = Plan::with(product, precision, [64, 64, 64], Choice { tile, splits: 1 });
                    let large = tile == Tile::Thin128 || tile.needs_warpgroups();
                    let limit = if large { 227 << 10 } else { 163 << 10 };
                    assert!(plan.shared_bytes <= limit, "{product:?} {precision:?} {tile:?}: {}", plan.shared_bytes);
                }
            }
        }
    }

    #[test]
    fn splits_are_limited_by_iterations() {
        let plan =
            Plan::with(Product::Forward, Precision::F16, [32, 128, 200], Choice { tile: Tile::Thin16, splits: 16 });
        assert_eq!((plan.splits, plan.blocks, plan.iterations, plan.tickets), (2, 16, 1, 8));
        assert_eq!(plan.workspace_bytes, 16 * (32 * 16 + 32) * 4);
        let unsplit =
            Plan::with(Product::Forward, Precision::F16, [32, 128, 100], Choice { tile: Tile::Thin16, splits: 16 });
        assert_eq!((unsplit.splits, unsplit.workspace_bytes, unsplit.tickets), (1, 0, 0));
        let two_levels = Choice { tile: Tile::Warpgroup, splits: 18 };
        let gradient = Plan::with(Product::Gradient, Precision::Tf32, [128, 784, 60_000], two_levels);
        // Seven tiles; each has groups of five, five, five and three blocks, and then a group of their four last
        // blocks.
        assert_eq!((gradient.blocks, gradient.iterations, gradient.tickets), (7 * 18, 105, 7 * 5));
    }
}
