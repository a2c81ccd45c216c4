//! Data sets from the outside: files good and bad, downloads from a server in this process, fallbacks, and the same
//! data for the same seed.
//!
//! No test touches the user's cache or the network beyond 127.0.0.1. The real MNIST is read if `MNIST_DIR` names it.

#[cfg(feature = "download")]
mod download;

use crate::mutate::{mutations, seeds};
use flate2::Compression;
use flate2::write::GzEncoder;
use ring::digest::{SHA256, digest};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use trainer::data::{
    DataError, DataRequest, Dataset, DatasetName, Download, Features, IdxKind, IdxLimits, Origin, Sources, Split,
    load_with, locate_mnist_with, parse_idx,
};
use trainer::observer::Silent;

const NAMES: [&str; 4] =
    ["train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"];

/// A small MNIST: 20 + 10 images of 4×3.
fn small() -> [Vec<u8>; 4] {
    let images = |count: u32| {
        let header = [2051, count, 4, 3].map(u32::to_be_bytes).concat();
        header.into_iter().chain((0..count * 12).map(|at| (at * 7 % 251) as u8)).collect()
    };
    let labels = |count: u32| {
        let header = [2049, count].map(u32::to_be_bytes).concat();
        header.into_iter().chain((0..count).map(|at| (at % 10) as u8)).collect()
    };
    [images(20), labels(20), images(10), labels(10)]
}

fn gz(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn sha256(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Nothing anywhere: an empty cache, no mirror, and the standard files' sums.
fn nowhere(cache: &Path) -> Sources {
    Sources { env_dir: None, cache_dir: Some(cache.to_owned()), mirrors: Vec::new(), ..Sources::from_environment() }
}

/// Makes `sources` expect these files.
fn expecting(mut sources: Sources, files: &[Vec<u8>; 4]) -> Sources {
    for (standard, bytes) in sources.files.iter_mut().zip(files) {
        standard.bytes = bytes.len() as u64;
        standard.sha256 = sha256(bytes);
        standard.gz_sha256 = Some(sha256(&gz(bytes)));
    }
    sources
}

fn put(directory: &Path, files: &[Vec<u8>; 4]) {
    fs::create_dir_all(directory).unwrap();
    for (name, bytes) in NAMES.iter().zip(files) {
        fs::write(directory.join(name), bytes).unwrap();
    }
}

fn request(name: DatasetName, data_dir: Option<PathBuf>) -> DataRequest {
    DataRequest { name, data_dir, seed: 42, offline: false }
}

/// Loads `files` as given by `--data-dir`.
fn from_dir(files: &[Vec<u8>; 4]) -> Result<Dataset, DataError> {
    let (dir, cache) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    put(dir.path(), files);
    load_with(&request(DatasetName::Mnist, Some(dir.path().to_owned())), &nowhere(cache.path()), &Silent)
}

fn bytes(split: &Split) -> &[u8] {
    match &split.features {
        Features::U8 { bytes, .. } => bytes,
        Features::F32(_) => panic!("images are bytes"),
    }
}

fn assert_small(data: &Dataset) {
    let files = small();
    assert_eq!((data.name, data.features, data.classes), (DatasetName::Mnist, 12, 10));
    assert_eq!((data.train.rows, data.validation.rows), (20, 10));
    assert_eq!(bytes(&data.train), &files[0][16..]);
    assert_eq!(data.train.labels, &files[1][8..]);
    assert_eq!(bytes(&data.validation), &files[2][16..]);
    assert_eq!(data.validation.labels, &files[3][8..]);
    for (checksum, file) in data.files.iter().zip(&files) {
        assert_eq!(checksum.sha256, sha256(file));
    }
}

/// The message of a failure that must be one line and bad input.
fn message(outcome: Result<Dataset, DataError>) -> String {
    let error = outcome.expect_err("this must fail");
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
#[ignore = "needs MNIST in the folder that MNIST_DIR names; run with --ignored"]
fn the_real_mnist_has_its_checksums() {
    let sources = Sources::from_environment();
    let dir = sources.env_dir.clone().expect("MNIST_DIR names the folder");
    let start = Instant::now();
    let data = load_with(&request(DatasetName::Auto, None), &sources, &Silent).unwrap();
    eprintln!("{} loaded in {:?}", dir.display(), start.elapsed());
    assert_eq!((data.name, data.notice.as_deref()), (DatasetName::Mnist, None));
    assert_eq!((data.train.rows, data.validation.rows, data.features, data.classes), (60_000, 10_000, 784, 10));
    for (actual, standard) in data.files.iter().zip(&sources.files) {
        assert_eq!(actual.sha256, standard.sha256);
    }
    assert_eq!(data.checksum, "e9914cff2ade526da2ab1ac60c072f9173cc53e35b9411692de8207cb1b9009d");
    assert_eq!(data.train.labels[..8], [5, 0, 4, 1, 9, 2, 1, 3]);
}

#[test]
fn every_layout_and_spelling_is_read() {
    let files = small();
    let dotted = |name: &str| name.replace("-idx", ".idx");
    type Spelling<'a> = &'a dyn Fn(&Path, &str, &[u8]);
    let ways: [Spelling; 5] = [
        &|dir, name, bytes| fs::write(dir.join(name), bytes).unwrap(),
        &|dir, name, bytes| fs::write(dir.join(format!("{name}.gz")), gz(bytes)).unwrap(),
        &|dir, name, bytes| fs::write(dir.join(dotted(name)), bytes).unwrap(),
        // A browser unpacked it and kept the name.
        &|dir, name, bytes| fs::write(dir.join(format!("{}.gz", dotted(name))), bytes).unwrap(),
        &|dir, name, bytes| {
            fs::create_dir_all(dir.join("MNIST/raw")).unwrap();
            fs::write(dir.join("MNIST/raw").join(name), bytes).unwrap();
        },
    ];
    for way in ways {
        let (dir, cache) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        NAMES.iter().zip(&files).for_each(|(name, bytes)| way(dir.path(), name, bytes));
        let data =
            load_with(&request(DatasetName::Mnist, Some(dir.path().to_owned())), &nowhere(cache.path()), &Silent)
                .unwrap();
        assert_small(&data);
        assert!(data.source.contains("--data-dir"), "{}", data.source);
        assert!(data.notice.unwrap().contains("does not hold the standard MNIST"));
    }
}

#[test]
fn bad_files_are_named_with_place_and_mend() {
    let spoilt = |spoil: &dyn Fn(&mut [Vec<u8>; 4])| {
        let mut files = small();
        spoil(&mut files);
        message(from_dir(&files))
    };
    type Spoil<'a> = &'a dyn Fn(&mut [Vec<u8>; 4]);
    let cases: [(Spoil, &[&str]); 8] = [
        (&|files| files[0].truncate(100), &["train-images", "ends after 100 of 256 bytes", "fetch it afresh"]),
        (&|files| files.swap(0, 1), &["train-", "offset 0: the magic number is", "the names may be swapped"]),
        (&|files| files[1].push(0), &["train-labels", "offset 28", "more bytes than"]),
        (&|files| files.swap(1, 3), &["20 images", "10 labels", "from the same set"]),
        (&|files| files[3][8 + 4] = 11, &["t10k-labels", "offset 12: the label is 11", "0 to 9"]),
        (
            &|files| {
                files[2][8..16].copy_from_slice(&[3u32, 4].map(u32::to_be_bytes).concat());
            },
            &["images of 4x3", "images of 3x4"],
        ),
        (&|files| files[2] = b"<html>404</html>".to_vec(), &["t10k-images", "it looks like a web page"]),
        (&|files| files[0][4] = 0xff, &["train-images", "offset 4", "bytes where at most"]),
    ];
    for (spoil, parts) in cases {
        let message = spoilt(spoil);
        for part in parts {
            assert!(message.contains(part), "{part:?} is not in {message:?}");
        }
    }
}

#[test]
fn bad_gzip_is_refused() {
    let spoilt = |spoil: &dyn Fn(&[u8]) -> Vec<u8>| {
        let mut files = small();
        files[0] = spoil(&files[0]);
        message(from_dir(&files))
    };
    // 64 MiB of zeros behind a header that announces 240 bytes: it must stop at once, and not only because memory
    // would do.
    let start = Instant::now();
    let bomb = gz(&[&small()[0][..16], &vec![0; 64 << 20]].concat());
    let packed = start.elapsed();
    let start = Instant::now();
    let bomb = spoilt(&|_| bomb.clone());
    assert!(bomb.contains("offset 256: there are more bytes than the 256"), "{bomb}");
    assert!(start.elapsed() < packed + Duration::from_millis(200));

    let cut = spoilt(&|file| gz(file)[..60].to_vec());
    assert!(cut.contains("ends after") && cut.contains("of 256 bytes"), "{cut}");
    let no_sum = spoilt(&|file| {
        let packed = gz(file);
        packed[..packed.len() - 5].to_vec()
    });
    assert!(no_sum.contains("ends before its checksum"), "{no_sum}");
    let wrong_sum = spoilt(&|file| {
        let mut packed = gz(file);
        let sum = packed.len() - 8;
        packed[sum] ^= 1;
        packed
    });
    assert!(wrong_sum.contains("broken gzip data"), "{wrong_sum}");
    let garbage = spoilt(&|file| [gz(file), b"more".to_vec()].concat());
    assert!(garbage.contains("gzip"), "{garbage}");
    let twice = spoilt(&|file| gz(&gz(file)));
    assert!(twice.contains("compressed twice"), "{twice}");
}

#[test]
fn a_directory_that_the_user_names_is_used_or_refused() {
    let (dir, cache) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    put(dir.path(), &small());
    fs::remove_file(dir.path().join(NAMES[3])).unwrap();
    put(cache.path(), &small());
    let sources = expecting(nowhere(cache.path()), &small());
    let gone = dir.path().join("gone");
    for name in [DatasetName::Mnist, DatasetName::Auto] {
        let lacking = message(load_with(&request(name, Some(dir.path().to_owned())), &sources, &Silent));
        assert!(
            lacking.contains(NAMES[3])
                && lacking.contains(&dir.path().display().to_string())
                && lacking.contains("--data-dir"),
            "{lacking}"
        );
        let absent = message(load_with(&request(name, Some(gone.clone())), &sources, &Silent));
        assert!(absent.contains("not a directory"), "{absent}");
        let by_variable = Sources { env_dir: Some(dir.path().to_owned()), ..sources.clone() };
        let lacking = message(load_with(&request(name, None), &by_variable, &Silent));
        assert!(lacking.contains("MNIST_DIR"), "{lacking}");
        fs::write(dir.path().join(NAMES[3]), b"broken").unwrap();
        message(load_with(&request(name, None), &by_variable, &Silent));
        fs::remove_file(dir.path().join(NAMES[3])).unwrap();
        // By default, the cache is used.
        assert_small(&load_with(&request(name, None), &sources, &Silent).unwrap());
    }
}

#[test]
fn the_cache_holds_the_standard_files_or_is_refused() {
    let cache = TempDir::new().unwrap();
    put(cache.path(), &small());
    let sources = nowhere(cache.path());
    let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &Silent));
    assert!(
        message.contains("SHA-256") && message.contains(NAMES[0]) && message.contains("delete it and run again"),
        "{message}"
    );
    let fallback = load_with(&request(DatasetName::Auto, None), &sources, &Silent).unwrap();
    assert_eq!(fallback.name, DatasetName::Digits);
    assert!(fallback.notice.unwrap().contains("delete it and run again"));
}

#[test]
fn offline_says_so() {
    let cache = TempDir::new().unwrap();
    let offline = |name| DataRequest { offline: true, ..request(name, None) };
    let sources = Sources { mirrors: vec!["http://127.0.0.1:9/".to_owned()], ..nowhere(cache.path()) };
    let message = message(load_with(&offline(DatasetName::Mnist), &sources, &Silent));
    assert!(message.contains("not on this machine"), "{message}");
    if cfg!(feature = "download") {
        assert!(message.contains("offline"), "{message}");
    } else {
        assert!(message.contains("built without"), "{message}");
    }
    let fallback = load_with(&offline(DatasetName::Auto), &sources, &Silent).unwrap();
    assert_eq!(fallback.name, DatasetName::Digits);
    assert!(fallback.notice.unwrap().contains("stand in for MNIST"));
}

#[test]
fn places_are_reported_without_reading() {
    let (dir, cache) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let sources = Sources { mirrors: vec!["http://mirror.invalid/".to_owned()], ..nowhere(cache.path()) };
    let empty = locate_mnist_with(&request(DatasetName::Auto, None), &sources);
    assert!(empty.complete().is_none());
    let cached = empty.candidate.as_ref().unwrap();
    assert_eq!((cached.origin, cached.missing.len()), (Origin::Cache, 4));
    if cfg!(feature = "download") {
        assert_eq!(empty.download, Download::Possible(sources.mirrors.clone()));
        assert!(empty.to_string().contains("would be downloaded from http://mirror.invalid/"), "{empty}");
    }
    NAMES.iter().for_each(|name| fs::write(dir.path().join(name), "nonsense").unwrap());
    let actual = locate_mnist_with(&request(DatasetName::Auto, Some(dir.path().to_owned())), &sources);
    assert_eq!(actual.complete().unwrap().origin, Origin::DataDir);
    assert_eq!(actual.download, Download::NotWanted);
    fs::remove_file(dir.path().join(NAMES[2])).unwrap();
    let partial = locate_mnist_with(&request(DatasetName::Auto, Some(dir.path().to_owned())), &sources);
    assert_eq!(partial.candidate.unwrap().missing, [NAMES[2]]);
}

#[test]
fn digits_are_the_same_everywhere() {
    let generate = |seed| {
        load_with(&DataRequest { seed, ..request(DatasetName::Digits, None) }, &Sources::from_environment(), &Silent)
            .unwrap()
    };
    let start = Instant::now();
    let data = generate(42);
    eprintln!("digits generated in {:?}", start.elapsed());
    assert_eq!(
        (data.name, data.source.as_str(), data.features, data.classes),
        (DatasetName::Digits, "generated, seed 42", 784, 10)
    );
    assert_eq!((data.train.rows, data.validation.rows), (8000, 2000));
    // A change here changes every recorded loss curve: say so in the changelog.
    assert_eq!(data.checksum, "eb614f8a63503d54e0a190a011354811795eba08ad74bfd474ec90a14967ee77");
    assert_eq!(generate(42).train.features, data.train.features);
    let other = generate(43);
    assert_ne!(other.checksum, data.checksum);
    assert_ne!(other.train.labels, data.train.labels);
}

#[test]
fn iris_is_split_in_proportion_and_standardised() {
    let load = |seed| {
        load_with(&DataRequest { seed, ..request(DatasetName::Iris, None) }, &Sources::from_environment(), &Silent)
            .unwrap()
    };
    let data = load(42);
    assert_eq!(
        (data.name, data.features, data.classes, data.train.rows, data.validation.rows),
        (DatasetName::Iris, 4, 3, 120, 30)
    );
    for class in 0..3 {
        assert_eq!(data.train.labels.iter().filter(|&&label| label == class).count(), 40);
        assert_eq!(data.validation.labels.iter().filter(|&&label| label == class).count(), 10);
    }
    let mut rows = vec![[0.0f32; 4]; 120];
    let features = data.train.features.rows();
    rows.iter_mut().enumerate().for_each(|(row, out)| features.copy(row, out));
    for feature in 0..4 {
        let mean = rows.iter().map(|row| f64::from(row[feature])).sum::<f64>() / 120.0;
        let variance = rows.iter().map(|row| f64::from(row[feature]).powi(2)).sum::<f64>() / 120.0;
        assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-5, "{mean} {variance}");
    }
    assert_eq!(load(42).checksum, data.checksum);
    assert_ne!(load(43).checksum, data.checksum);
}

#[test]
fn a_directory_that_is_not_used_is_mentioned() {
    let data =
        load_with(&request(DatasetName::Iris, Some("/nowhere".into())), &Sources::from_environment(), &Silent).unwrap();
    assert!(data.notice.unwrap().contains("--data-dir"));
}

// The fuzz target of IDX files: its seeds and some thousand mutations of them.

fn parse(bytes: &[u8]) -> bool {
    [IdxKind::Images, IdxKind::Labels].into_iter().fold(false, |sound, kind| {
        let limits = IdxLimits { max_bytes: 1 << 24, ..IdxLimits::new(kind) };
        match parse_idx(bytes, "fuzz", &limits) {
            Ok(idx) => {
                assert_eq!(idx.data.len(), idx.items() * idx.features());
                true
            }
            Err(error) => {
                assert!(!error.to_string().contains('\n'), "an error is one line: {error}");
                sound
            }
        }
    })
}

#[test]
fn idx_files() {
    let seeds = seeds("idx");
    assert!(seeds.iter().all(|(_, seed)| parse(seed)), "a seed should be sound");
    let sound = mutations(&seeds, 5000).filter(|mutation| parse(mutation)).count();
    assert!(sound > 0, "some mutations should still be sound, or they reach nothing but the head");
}
