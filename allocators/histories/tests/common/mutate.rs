//! Deterministic mutations of seeds. Included by the smoke tests of `allocators` and of `trainer`.

use flate2::read::GzDecoder;
use std::io::Read;
use std::path::Path;

/// The seeds of a target, by name: the files of its directory in `fuzz/corpus.tar.gz`.
pub(crate) fn seeds(target: &str) -> Vec<(String, Vec<u8>)> {
    let archive =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join("allocators/fuzz/corpus.tar.gz"));
    let archive =
        archive.into_iter().find_map(|path| std::fs::File::open(path).ok()).expect("the checkout has the corpus");
    let mut archive = tar::Archive::new(GzDecoder::new(archive));
    let mut seeds = Vec::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        if entry.header().entry_type().is_file() && path.parent().is_some_and(|folder| folder.ends_with(target)) {
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            seeds.push((path.file_name().unwrap().to_str().unwrap().to_owned(), bytes));
        }
    }
    assert!(!seeds.is_empty(), "there should be seeds of {target}");
    seeds
}

/// Marsaglia's xorshift.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Below `bound`, which is not 0.
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }
}

/// `rounds` mutations of each seed.
pub(crate) fn mutations(seeds: &[(String, Vec<u8>)], rounds: u64) -> impl Iterator<Item = Vec<u8>> {
    (0..rounds).flat_map(move |round| {
        seeds.iter().enumerate().map(move |(number, (_, seed))| {
            let mut random = Random((round + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number as u64);
            let mut bytes = seed.clone();
            for _ in 0..=random.below(3) {
                mutate(&mut bytes, seeds, &mut random);
            }
            bytes
        })
    })
}

fn mutate(bytes: &mut Vec<u8>, seeds: &[(String, Vec<u8>)], random: &mut Random) {
    if bytes.is_empty() {
        bytes.push(0);
    }
    let at = random.below(bytes.len());
    let length = (1 + random.below(16)).min(bytes.len() - at);
    match random.below(8) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = u8::try_from(random.below(256)).unwrap(),
        2 => drop(bytes.drain(at..at + length)),
        3 => bytes.truncate(at),
        4 => {
            let part = bytes[at..at + length].to_vec();
            let to = random.below(bytes.len());
            bytes.splice(to..to, part);
        }
        5 => {
            // Edge cases of a length, an index or a size.
            let edges = [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 62, 1 << 63, u64::MAX];
            let edge = edges[random.below(edges.len())].to_le_bytes();
            for (slot, byte) in bytes[at..].iter_mut().zip(edge) {
                *slot = byte;
            }
        }
        6 => {
            // Edge cases as text.
            let edges =
                ["-1", "0", "1000000000", "9223372036854775808", "18446744073709551616", "1e999", "(nil)", "\""];
            bytes.splice(at..at + length, edges[random.below(edges.len())].bytes());
        }
        _ => {
            let (_, other) = &seeds[random.below(seeds.len())];
            let from = random.below(other.len());
            let until = (from + 1 + random.below(64)).min(other.len());
            bytes.splice(at..at + length, other[from..until].iter().copied());
        }
    }
}
