//! A plan as a file, and the mapping of requests to its blocks.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use vramlab_device::{StreamId, input};

/// The value of a file's first key.
const FORMAT: &str = "vramlab-plan-1";
/// Number of blocks that are searched after the first missing one.
const WINDOW: usize = 256;
/// No device has more memory.
const MOST_BYTES: u64 = 1 << 48;

/// One block of a plan: requested bytes, number of the stream, offset.
pub type Placement = (u64, u32, u64);

/// A plan in the form of its file: JSON, one array for each block in the order of the requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanTable {
    format: String,
    /// Bytes of the arena.
    pub bytes: u64,
    /// Its blocks.
    pub blocks: Vec<Placement>,
}

impl PlanTable {
    /// A plan of `bytes` bytes.
    #[must_use]
    pub fn new(bytes: u64, blocks: Vec<Placement>) -> Self {
        Self { format: FORMAT.to_owned(), bytes, blocks }
    }

    /// Reads a plan from a file.
    ///
    /// # Errors
    /// One line with the fault in the file, without its name.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = input::read_text(path, input::TABLE).map_err(|error| error.to_string())?;
        let table: Self = serde_json::from_str(&text).map_err(|error| {
            // The error quotes the file.
            format!("it is not a plan ({})", input::excerpt(&error.to_string(), 160))
        })?;
        if table.format != FORMAT {
            return Err(format!("it is not a plan of the format {FORMAT}"));
        }
        let fits = |&(requested, _, offset): &Placement| {
            let end = requested.checked_next_multiple_of(super::UNIT).and_then(|bytes| offset.checked_add(bytes));
            requested > 0 && offset.is_multiple_of(super::UNIT) && end.is_some_and(|end| end <= table.bytes)
        };
        match table.blocks.iter().position(|block| !fits(block)) {
            Some(at) => Err(format!("block {} is outside of the plan's {} bytes, or not aligned", at + 1, table.bytes)),
            None if table.bytes > MOST_BYTES => Err("no device has more than 256 TiB".to_owned()),
            None => Ok(table),
        }
    }

    /// As text for a file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let rows: Vec<String> =
            self.blocks.iter().map(|(bytes, stream, at)| format!("[{bytes},{stream},{at}]")).collect();
        let Self { format, bytes, .. } = self;
        format!("{{\"format\": \"{format}\", \"bytes\": {bytes}, \"blocks\": [\n{}\n]}}\n", rows.join(",\n"))
    }
}

/// The file name of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanFile(pub Option<PathBuf>);

impl FromStr for PlanFile {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self((text != "none").then(|| text.into())))
    }
}

impl fmt::Display for PlanFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(path) => path.display().fmt(f),
            None => f.write_str("none"),
        }
    }
}

impl Serialize for PlanFile {
    /// As its text, or `null`.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.as_ref().map(|_| self.to_string()).serialize(serializer)
    }
}

/// The position of a program in a plan.
///
/// A request matches a block of the plan if it has the same bytes and stream, and comes in its turn, or up to some hundred requests
/// early or late. After the last block the plan starts again.
#[derive(Debug)]
pub(super) struct Schedule {
    table: PlanTable,
    /// Blocks that were requested.
    come: Vec<bool>,
    /// The first block that was not requested.
    next: usize,
    /// The program's streams of the plan's stream numbers.
    streams: Vec<Option<StreamId>>,
}

impl Schedule {
    pub(super) fn new(table: PlanTable) -> Self {
        let mut streams: Vec<u32> = table.blocks.iter().map(|(_, stream, _)| *stream).collect();
        streams.sort_unstable();
        streams.dedup();
        let mut table = table;
        // Numbers may have gaps.
        for (_, stream, _) in &mut table.blocks {
            // CAST: at most the count of the numbers.
            *stream = streams.partition_point(|number| number < stream) as u32;
        }
        Self { come: vec![false; table.blocks.len()], next: 0, streams: vec![None; streams.len()], table }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.table.bytes
    }

    /// Whether it has blocks of more than one stream.
    pub(super) fn has_streams(&self) -> bool {
        self.streams.len() > 1
    }

    /// The offset of the block that a request matches; `None` when it matches none.
    pub(super) fn find(&mut self, requested: u64, stream: StreamId) -> Option<u64> {
        let known = self.streams.contains(&Some(stream));
        let end = (self.next + WINDOW).min(self.come.len());
        let at = (self.next..end).find(|&at| {
            let (bytes, number, _) = self.table.blocks[at];
            let is = self.streams[number as usize];
            !self.come[at] && bytes == requested && (is == Some(stream) || (is.is_none() && !known))
        })?;
        let (_, number, offset) = self.table.blocks[at];
        self.streams[number as usize] = Some(stream);
        self.come[at] = true;
        // A block that is long overdue will not be requested.
        self.next = self.next.max(at.saturating_sub(WINDOW / 2));
        while self.come.get(self.next) == Some(&true) {
            self.next += 1;
        }
        if self.next == self.come.len() {
            self.next = 0;
            self.come.fill(false);
        }
        Some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(number: u64) -> StreamId {
        crate::stream(number)
    }

    #[test]
    fn requests_are_found_where_they_are_due() {
        let blocks = vec![(100, 0, 0), (200, 7, 512), (100, 0, 1024), (300, 7, 1536)];
        let mut schedule = Schedule::new(PlanTable::new(2048, blocks));
        assert_eq!(schedule.find(100, stream(5)), Some(0));
        assert_eq!(schedule.find(200, stream(5)), None, "that is of another stream");
        assert_eq!(schedule.find(300, stream(6)), Some(1536), "early");
        assert_eq!(schedule.find(100, stream(6)), None, "it is due on the first stream");
        assert_eq!(schedule.find(100, stream(5)), Some(1024));
        assert_eq!(schedule.find(100, stream(5)), None);
        assert_eq!(schedule.find(200, stream(6)), Some(512));
        assert_eq!(schedule.find(100, stream(5)), Some(0), "all were requested, and the plan starts again");
    }

    #[test]
    fn what_is_overdue_is_given_up() {
        let blocks = (0..1000).map(|at| (if at == 0 { 7 } else { 1000 + at }, 0, 0)).collect();
        let mut schedule = Schedule::new(PlanTable::new(1024, blocks));
        assert!(
            (1..999).all(|at| schedule.find(1000 + at, stream(1)).is_some()),
            "a block that is never requested is skipped"
        );
        assert_eq!(schedule.find(7, stream(1)), None);
        assert!(schedule.find(1999, stream(1)).is_some());
        assert!(schedule.find(7, stream(1)).is_some(), "until the plan starts again");
    }

    #[test]
    fn a_file_that_is_no_plan_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("plan.json");
        let table = PlanTable::new(1024, vec![(1, 0, 0), (512, 3, 512)]);
        std::fs::write(&path, table.to_json()).unwrap();
        assert_eq!(PlanTable::read(&path).unwrap(), table);
        let blocks = |blocks: &str| format!("{{\"format\": \"{FORMAT}\", \"bytes\": 1024, \"blocks\": {blocks}}}");
        for (text, words) in [
            (String::new(), "not a plan"),
            ("[]".to_owned(), "not a plan"),
            (blocks("[]").replace(FORMAT, "other"), "not a plan of the format"),
            (blocks("[[1, 0, 0], [513, 0, 512]]"), "block 2 is outside"),
            (blocks("[[1, 0, 8]]"), "not aligned"),
            (blocks("[[0, 0, 0]]"), "block 1"),
            (blocks("[[18446744073709551615, 0, 0]]"), "block 1"),
            (blocks("[]").replace("1024", "1000000000000000000"), "256 TiB"),
        ] {
            std::fs::write(&path, &text).unwrap();
            let error = PlanTable::read(&path).unwrap_err();
            assert!(error.contains(words) && !error.contains('\n'), "{text}: {error}");
        }
        assert!(PlanTable::read(&folder.path().join("none")).is_err());
        let name = "\\u001b[2J".repeat(1 << 16);
        std::fs::write(&path, format!("{{\"{name}\": 1}}")).unwrap();
        let error = PlanTable::read(&path).unwrap_err();
        assert!(error.len() < 1000 && !error.contains('\u{1b}'), "{error}");
        #[cfg(unix)]
        assert!(PlanTable::read(Path::new("/dev/zero")).unwrap_err().contains("it is a device"));
    }
}
