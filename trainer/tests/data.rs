//! Data sets from the outside: files good and bad, downloads from a server in this process, fallbacks, and the same data for the same seed.
//!
//! No test touches the user's cache or the network beyond 127.0.0.1. The real MNIST is read if `MNIST_DIR` names it.

// The lint spares only functions marked as tests, not what they call.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use trainer::data::{
    DataError, DataRequest, Dataset, DatasetName, Download, Features, NoProgress, Origin, Sources, Split, load_with,
    locate_mnist_with,
};

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
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
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
    load_with(&request(DatasetName::Mnist, Some(dir.path().to_owned())), &nowhere(cache.path()), &mut NoProgress)
}

fn bytes(split: &Split) -> &[u8] {
    match &split.features {
        Features::U8 { bytes, .. } => bytes,
        Features::F32(_) => panic!("images are bytes"),
    }
}

fn assert_small(data: &Dataset) {
    let files = small();
    assert_eq!((data.name, data.features, data.classes), ("mnist", 12, 10));
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
    assert!(error.is_input());
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

#[test]
fn the_real_mnist_has_its_checksums() {
    let sources = Sources::from_environment();
    let Some(dir) = sources.env_dir.clone() else {
        eprintln!("skipped: MNIST_DIR is not set");
        return;
    };
    let start = Instant::now();
    let data = load_with(&request(DatasetName::Auto, None), &sources, &mut NoProgress).unwrap();
    eprintln!("{} loaded in {:?}", dir.display(), start.elapsed());
    assert_eq!((data.name, data.notice.as_deref()), ("mnist", None));
    assert_eq!((data.train.rows, data.validation.rows, data.features, data.classes), (60_000, 10_000, 784, 10));
    for (found, standard) in data.files.iter().zip(&sources.files) {
        assert_eq!(found.sha256, standard.sha256);
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
        let data = load_with(
            &request(DatasetName::Mnist, Some(dir.path().to_owned())),
            &nowhere(cache.path()),
            &mut NoProgress,
        )
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
    // 64 MiB of zeros behind a header that announces 240 bytes: it must stop at once, and not only because memory would do.
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
        let lacking = message(load_with(&request(name, Some(dir.path().to_owned())), &sources, &mut NoProgress));
        assert!(
            lacking.contains(NAMES[3])
                && lacking.contains(&dir.path().display().to_string())
                && lacking.contains("--data-dir"),
            "{lacking}"
        );
        let absent = message(load_with(&request(name, Some(gone.clone())), &sources, &mut NoProgress));
        assert!(absent.contains("not a directory"), "{absent}");
        let by_variable = Sources { env_dir: Some(dir.path().to_owned()), ..sources.clone() };
        let lacking = message(load_with(&request(name, None), &by_variable, &mut NoProgress));
        assert!(lacking.contains("MNIST_DIR"), "{lacking}");
        fs::write(dir.path().join(NAMES[3]), b"broken").unwrap();
        message(load_with(&request(name, None), &by_variable, &mut NoProgress));
        fs::remove_file(dir.path().join(NAMES[3])).unwrap();
        // Without being told otherwise, the cache serves.
        assert_small(&load_with(&request(name, None), &sources, &mut NoProgress).unwrap());
    }
}

#[test]
fn the_cache_holds_the_standard_files_or_is_refused() {
    let cache = TempDir::new().unwrap();
    put(cache.path(), &small());
    let sources = nowhere(cache.path());
    let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &mut NoProgress));
    assert!(
        message.contains("SHA-256") && message.contains(NAMES[0]) && message.contains("delete it and run again"),
        "{message}"
    );
    let fallback = load_with(&request(DatasetName::Auto, None), &sources, &mut NoProgress).unwrap();
    assert_eq!(fallback.name, "digits");
    assert!(fallback.notice.unwrap().contains("delete it and run again"));
}

#[test]
fn offline_says_so() {
    let cache = TempDir::new().unwrap();
    let offline = |name| DataRequest { offline: true, ..request(name, None) };
    let sources = Sources { mirrors: vec!["http://127.0.0.1:9/".to_owned()], ..nowhere(cache.path()) };
    let message = message(load_with(&offline(DatasetName::Mnist), &sources, &mut NoProgress));
    assert!(message.contains("not on this machine"), "{message}");
    if cfg!(feature = "download") {
        assert!(message.contains("offline"), "{message}");
    } else {
        assert!(message.contains("built without"), "{message}");
    }
    let fallback = load_with(&offline(DatasetName::Auto), &sources, &mut NoProgress).unwrap();
    assert_eq!(fallback.name, "digits");
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
    let found = locate_mnist_with(&request(DatasetName::Auto, Some(dir.path().to_owned())), &sources);
    assert_eq!(found.complete().unwrap().origin, Origin::DataDir);
    assert_eq!(found.download, Download::NotWanted);
    fs::remove_file(dir.path().join(NAMES[2])).unwrap();
    let partial = locate_mnist_with(&request(DatasetName::Auto, Some(dir.path().to_owned())), &sources);
    assert_eq!(partial.candidate.unwrap().missing, [NAMES[2]]);
}

#[test]
fn digits_are_the_same_everywhere() {
    let generate = |seed| {
        load_with(
            &DataRequest { seed, ..request(DatasetName::Digits, None) },
            &Sources::from_environment(),
            &mut NoProgress,
        )
        .unwrap()
    };
    let start = Instant::now();
    let data = generate(42);
    eprintln!("digits generated in {:?}", start.elapsed());
    assert_eq!(
        (data.name, data.source.as_str(), data.features, data.classes),
        ("digits", "generated, seed 42", 784, 10)
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
        load_with(
            &DataRequest { seed, ..request(DatasetName::Iris, None) },
            &Sources::from_environment(),
            &mut NoProgress,
        )
        .unwrap()
    };
    let data = load(42);
    assert_eq!(
        (data.name, data.features, data.classes, data.train.rows, data.validation.rows),
        ("iris", 4, 3, 120, 30)
    );
    for class in 0..3 {
        assert_eq!(data.train.labels.iter().filter(|&&label| label == class).count(), 40);
        assert_eq!(data.validation.labels.iter().filter(|&&label| label == class).count(), 10);
    }
    let mut rows = vec![[0.0f32; 4]; 120];
    rows.iter_mut().enumerate().for_each(|(row, out)| data.train.features.copy_row(row, out));
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
        load_with(&request(DatasetName::Iris, Some("/nowhere".into())), &Sources::from_environment(), &mut NoProgress)
            .unwrap();
    assert!(data.notice.unwrap().contains("--data-dir"));
}

#[cfg(feature = "download")]
mod download {
    use std::collections::HashMap;
    use std::io::{BufRead, BufReader};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    use trainer::data::Progress;

    use super::*;

    /// What a server was asked: the file, and where to start.
    type Asked = (String, Option<usize>);

    /// A server in this process.
    struct Server {
        url: String,
        asked: Arc<Mutex<Vec<Asked>>>,
    }

    /// How a server answers; the count is of requests for that file so far.
    type Answer = fn(&mut TcpStream, body: &[u8], start: Option<usize>, count: usize) -> std::io::Result<()>;

    fn head(stream: &mut TcpStream, status: &str, length: usize, more: &str) -> std::io::Result<()> {
        write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n")
    }

    fn whole(stream: &mut TcpStream, body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
        head(stream, "200 OK", body.len(), "")?;
        stream.write_all(body)
    }

    fn ranges(stream: &mut TcpStream, body: &[u8], start: Option<usize>, count: usize) -> std::io::Result<()> {
        match start {
            None => whole(stream, body, start, count),
            Some(start) if start >= body.len() => head(stream, "416 Range Not Satisfiable", 0, ""),
            Some(start) => {
                let range = format!("Content-Range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len());
                head(stream, "206 Partial Content", body.len() - start, &range)?;
                stream.write_all(&body[start..])
            }
        }
    }

    /// Sends half and hangs up, the first time.
    fn drops(stream: &mut TcpStream, body: &[u8], start: Option<usize>, count: usize) -> std::io::Result<()> {
        if count > 0 {
            return ranges(stream, body, start, count);
        }
        head(stream, "200 OK", body.len(), "")?;
        stream.write_all(&body[..body.len() / 2])
    }

    /// Sends half and hangs up, always.
    fn always_drops(stream: &mut TcpStream, body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
        head(stream, "200 OK", body.len(), "")?;
        stream.write_all(&body[..body.len() / 2])
    }

    fn serve(files: [Vec<u8>; 4], answer: Answer) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/mnist/", listener.local_addr().unwrap());
        let asked = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&asked);
        let bodies: HashMap<String, Vec<u8>> =
            NAMES.iter().map(|name| format!("/mnist/{name}.gz")).zip(files).collect();
        let bodies = Arc::new(bodies);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (mut stream, log, bodies) = (stream.unwrap(), Arc::clone(&log), Arc::clone(&bodies));
                // A thread each, because some answers take their time.
                std::thread::spawn(move || {
                    let lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
                    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
                    let Some(path) = lines.first().and_then(|line| line.split(' ').nth(1)) else {
                        return;
                    };
                    let range = lines
                        .iter()
                        .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
                    let start = range.map(|range| range.trim_end_matches('-').parse().unwrap());
                    let mut log = log.lock().unwrap();
                    let count = log.iter().filter(|(asked, _)| asked == path).count();
                    log.push((path.to_owned(), start));
                    drop(log);
                    // The client may hang up first.
                    let _ = answer(&mut stream, &bodies[path], start, count);
                });
            }
        });
        Server { url, asked }
    }

    fn packed() -> [Vec<u8>; 4] {
        small().map(|file| gz(&file))
    }

    fn sources(cache: &Path, mirrors: &[&str]) -> Sources {
        Sources { mirrors: mirrors.iter().map(|&url| url.to_owned()).collect(), ..expecting(nowhere(cache), &small()) }
    }

    /// Keeps the sums of what it was told.
    #[derive(Default)]
    struct Told {
        totals: u64,
        bytes: u64,
        open: i32,
    }

    impl Progress for Told {
        fn begin(&mut self, _what: &str, total_bytes: Option<u64>) {
            self.totals += total_bytes.unwrap_or_default();
            self.open += 1;
        }
        fn advance(&mut self, bytes: u64) {
            self.bytes += bytes;
        }
        fn finish(&mut self) {
            self.open -= 1;
        }
    }

    fn names_in(cache: &Path) -> Vec<String> {
        let mut names: Vec<String> =
            fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn assert_cached(cache: &Path) {
        let mut expected = NAMES.map(|name| format!("{name}.gz"));
        expected.sort();
        assert_eq!(names_in(cache), expected);
    }

    #[test]
    fn what_is_missing_is_fetched_once() {
        let cache = TempDir::new().unwrap();
        let server = serve(packed(), ranges);
        let sources = sources(&cache.path().join("new"), &[&server.url]);
        let mut told = Told::default();
        assert_small(&load_with(&request(DatasetName::Auto, None), &sources, &mut told).unwrap());
        let size: usize = packed().iter().map(Vec::len).sum();
        assert_eq!((told.totals, told.bytes, told.open), (size as u64, size as u64, 0));
        assert_cached(&cache.path().join("new"));
        assert_eq!(server.asked.lock().unwrap().len(), 4);
        // Now it is here, also for who is offline.
        let offline = DataRequest { offline: true, ..request(DatasetName::Mnist, None) };
        let data = load_with(&offline, &sources, &mut NoProgress).unwrap();
        assert_small(&data);
        assert_eq!(data.notice, None);
        // And what is here is not fetched again.
        fs::remove_file(cache.path().join("new").join(format!("{}.gz", NAMES[1]))).unwrap();
        assert_small(&load_with(&request(DatasetName::Mnist, None), &sources, &mut NoProgress).unwrap());
        assert_eq!(server.asked.lock().unwrap().len(), 5);
    }

    /// Leaves `part` of the training images behind, as a killed run does, and fetches.
    fn with_part(part: &[u8], answer: Answer) -> Vec<Asked> {
        let cache = TempDir::new().unwrap();
        fs::write(cache.path().join(format!("{}.gz.part", NAMES[0])), part).unwrap();
        let server = serve(packed(), answer);
        let data =
            load_with(&request(DatasetName::Mnist, None), &sources(cache.path(), &[&server.url]), &mut NoProgress)
                .unwrap();
        assert_small(&data);
        assert_cached(cache.path());
        let asked = server.asked.lock().unwrap();
        asked.iter().filter(|(path, _)| path.contains(NAMES[0])).cloned().collect()
    }

    fn starts(asked: &[Asked]) -> Vec<Option<usize>> {
        asked.iter().map(|(_, start)| *start).collect()
    }

    #[test]
    fn a_part_is_continued() {
        let file = &packed()[0];
        assert_eq!(starts(&with_part(&file[..50], ranges)), [Some(50)]);
        // Killed between the last byte and the renaming.
        assert_eq!(starts(&with_part(file, ranges)), [Some(file.len())]);
        // A server that knows no ranges sends everything.
        assert_eq!(starts(&with_part(&file[..50], whole)), [Some(50)]);
        assert_eq!(starts(&with_part(&[9; 5000], whole)), [Some(5000)]);
    }

    #[test]
    fn a_part_of_something_else_is_thrown_away() {
        assert_eq!(starts(&with_part(&[9; 50], ranges)), [Some(50), None]);
        assert_eq!(starts(&with_part(&[9; 5000], ranges)), [Some(5000), None]);
    }

    #[test]
    fn a_dropped_connection_is_taken_up_again() {
        let asked = with_part(&[], drops);
        assert_eq!(starts(&asked), [None, Some(packed()[0].len() / 2)]);
    }

    #[test]
    fn a_mirror_that_always_drops_is_left_for_the_next() {
        let cache = TempDir::new().unwrap();
        let (bad, good) = (serve(packed(), always_drops), serve(packed(), ranges));
        let sources = sources(cache.path(), &[&bad.url, &good.url]);
        assert_small(&load_with(&request(DatasetName::Mnist, None), &sources, &mut NoProgress).unwrap());
        assert_cached(cache.path());
        // The second mirror went on where the first had stopped, and was asked first from then on.
        assert_eq!(good.asked.lock().unwrap()[0].1, Some(packed()[0].len() / 2));
        assert!(bad.asked.lock().unwrap().iter().all(|(path, _)| path.contains(NAMES[0])));
    }

    #[test]
    fn wrong_contents_are_not_kept() {
        let mut files = packed();
        files[0] = gz(b"something else");
        let cache = TempDir::new().unwrap();
        let server = serve(files, ranges);
        let only = sources(cache.path(), &[&server.url]);
        let message = message(load_with(&request(DatasetName::Mnist, None), &only, &mut NoProgress));
        assert!(
            message.contains("SHA-256") && message.contains("127.0.0.1:") && message.contains(NAMES[0]),
            "{message}"
        );
        assert_eq!(names_in(cache.path()), Vec::<String>::new());
        // Another mirror has it.
        let good = serve(packed(), ranges);
        let both = sources(cache.path(), &[&server.url, &good.url]);
        assert_small(&load_with(&request(DatasetName::Mnist, None), &both, &mut NoProgress).unwrap());
    }

    #[test]
    fn a_mirror_of_ones_own_may_compress_afresh_but_not_alter() {
        let store = |file: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::none());
            encoder.write_all(file).unwrap();
            encoder.finish().unwrap()
        };
        let server = serve(small().map(|file| store(&file)), ranges);
        let cache = TempDir::new().unwrap();
        let strict = sources(cache.path(), &[&server.url]);
        message(load_with(&request(DatasetName::Mnist, None), &strict, &mut NoProgress));
        let mut lenient = strict.clone();
        lenient.files.iter_mut().for_each(|file| file.gz_sha256 = None);
        assert_small(&load_with(&request(DatasetName::Mnist, None), &lenient, &mut NoProgress).unwrap());

        let mut altered = small();
        altered[0][20] ^= 1;
        let server = serve(altered.map(|file| gz(&file)), ranges);
        let other = TempDir::new().unwrap();
        let altered =
            Sources { mirrors: vec![server.url.clone()], cache_dir: Some(other.path().to_owned()), ..lenient };
        let message = message(load_with(&request(DatasetName::Mnist, None), &altered, &mut NoProgress));
        assert!(message.contains("unpacked"), "{message}");
    }

    #[test]
    fn a_mirror_cannot_fill_the_disk() {
        fn endless(stream: &mut TcpStream, _body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
            write!(stream, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")?;
            (0..10_000).try_for_each(|_| stream.write_all(&[7; 4096]))
        }
        fn boastful(stream: &mut TcpStream, _body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
            head(stream, "200 OK", 1 << 40, "")
        }
        for answer in [endless as Answer, boastful] {
            let cache = TempDir::new().unwrap();
            let server = serve(packed(), answer);
            let sources = sources(cache.path(), &[&server.url]);
            let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &mut NoProgress));
            assert!(message.contains("it sends more than"), "{message}");
        }
    }

    #[test]
    fn a_stalled_download_ends() {
        fn stalls(stream: &mut TcpStream, body: &[u8], _start: Option<usize>, count: usize) -> std::io::Result<()> {
            head(stream, "200 OK", body.len(), "")?;
            stream.write_all(&body[..20 + count])?;
            std::thread::sleep(Duration::from_millis(700));
            Ok(())
        }
        let cache = TempDir::new().unwrap();
        let server = serve(packed(), stalls);
        let sources = Sources { stalled_after: Duration::from_millis(200), ..sources(cache.path(), &[&server.url]) };
        let start = Instant::now();
        let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &mut NoProgress));
        assert!(message.contains("after 2"), "{message}");
        assert!(start.elapsed() < Duration::from_secs(8));
    }

    #[test]
    fn auto_decides_soon_without_a_network() {
        fn silent(_stream: &mut TcpStream, _body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
            std::thread::sleep(Duration::from_secs(10));
            Ok(())
        }
        // A port that nobody listens on, a server that says nothing, an address that leads nowhere, a name that means nothing.
        let refused = format!("http://{}/", TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let silent = serve(packed(), silent);
        for mirrors in [
            vec![refused.as_str()],
            vec![&silent.url, &silent.url],
            vec!["http://192.0.2.1/", "http://198.51.100.1/"],
            vec!["https://mirror.invalid/", &refused, &silent.url],
            vec!["not a url"],
            vec![],
        ] {
            let cache = TempDir::new().unwrap();
            let start = Instant::now();
            let data = load_with(&request(DatasetName::Auto, None), &sources(cache.path(), &mirrors), &mut NoProgress)
                .unwrap();
            assert!(start.elapsed() < Duration::from_secs(3), "{mirrors:?}: {:?}", start.elapsed());
            assert_eq!(data.name, "digits");
            let notice = data.notice.unwrap();
            assert!(
                notice.contains("could not be downloaded") && notice.contains("--data-dir") && !notice.contains('\n'),
                "{notice}"
            );
            eprintln!("{:?}: {notice}", start.elapsed());
            assert_eq!(names_in(cache.path()), Vec::<String>::new());
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named() {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let server = serve(packed(), ranges);
        let message = message(load_with(
            &request(DatasetName::Mnist, None),
            &sources(&file.join("cache"), &[&server.url]),
            &mut NoProgress,
        ));
        assert!(message.contains("cannot write to the cache") && message.contains("GPU_ALLOCATORS_CACHE"), "{message}");
    }
}
