//! `vramlab replay --against FILE`: the allocator that has to put every block where a file says.

use super::ReplayArgs;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use terminal::arguments::Selections;
use vramlab::backends::all;
use vramlab::histories::formats::Placements;
use vramlab::{Bytes, Selection};

/// What a replay is compared with.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) path: PathBuf,
    pub(super) placements: Placements,
}

impl Compared {
    /// Reads the file.
    pub(super) fn read(path: &Path, args: &ReplayArgs) -> Result<Self> {
        ensure!(args.files.len() == 1, "--against compares one history; {} are named", args.files.len());
        let placements = Placements::read(path, &args.read.options().budget)?;
        Ok(Self { path: path.to_owned(), placements })
    }

    /// The allocators that were named, or the one that the file is of. Each gets what the file's header says of its settings.
    pub(super) fn chosen(&self, named: &[Selections]) -> Result<Vec<Selection>> {
        let (name, bytes) = self.placements.setting();
        let (path, theirs) = (self.path.display(), self.placements.allocator());
        let expected = all().into_iter().find(|backend| backend.has_setting(name));
        let expected = expected.with_context(|| format!("{path} is of {theirs}, which no allocator here follows"))?;
        let mut chosen: Vec<Selection> = named.iter().flat_map(|list| list.0.iter().cloned()).collect();
        if chosen.is_empty() {
            chosen.push(Selection::of(expected));
        }
        for alloc in &mut chosen {
            ensure!(
                alloc.backend() == expected,
                "{path} says where {theirs} put the blocks, and not {}; write --alloc {expected}",
                alloc.name()
            );
            if alloc.settings().json()[name].as_u64() == Some(bytes) {
                continue;
            }
            ensure!(
                !alloc.is_given(name),
                "{path} begins with a block of {} by its header, and {name} is another; leave {name} out",
                Bytes(bytes)
            );
            alloc.set(name, &bytes.to_string()).with_context(|| path.to_string())?;
            alloc.check()?;
        }
        Ok(chosen)
    }
}
