//! MNIST over HTTP from a server on this machine: whole, resumed, broken off, wrong.

use std::cell::Cell;
use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use trainer::data::Progress;

use super::*;

/// A request to a server: the file and the first byte.
type Asked = (String, Option<usize>);

/// A server in this process.
struct Server {
    url: String,
    asked: Arc<Mutex<Vec<Asked>>>,
}

/// Answer of a server; the count is of earlier requests for that file.
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
    let bodies: HashMap<String, Vec<u8>> = NAMES.iter().map(|name| format!("/mnist/{name}.gz")).zip(files).collect();
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
                let range =
                    lines.iter().find_map(|line| line.to_lowercase().strip_prefix("range: bytes=").map(str::to_owned));
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

/// Sums of the reported progress.
#[derive(Default)]
struct ProgressLog {
    totals: Cell<u64>,
    bytes: Cell<u64>,
    open: Cell<i32>,
}

impl Progress for ProgressLog {
    fn download_begin(&self, _what: &str, total_bytes: Option<u64>) {
        self.totals.set(self.totals.get() + total_bytes.unwrap_or_default());
        self.open.set(self.open.get() + 1);
    }
    fn download_advance(&self, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
    }
    fn download_finish(&self) {
        self.open.set(self.open.get() - 1);
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
    let progress = ProgressLog::default();
    assert_small(&load_with(&request(DatasetName::Auto, None), &sources, &progress).unwrap());
    let size: usize = packed().iter().map(Vec::len).sum();
    assert_eq!((progress.totals.get(), progress.bytes.get(), progress.open.get()), (size as u64, size as u64, 0));
    assert_cached(&cache.path().join("new"));
    assert_eq!(server.asked.lock().unwrap().len(), 4);
    // Now it is here, also for who is offline.
    let offline = DataRequest { offline: true, ..request(DatasetName::Mnist, None) };
    let data = load_with(&offline, &sources, &Silent).unwrap();
    assert_small(&data);
    assert_eq!(data.notice, None);
    // And what is here is not fetched again.
    fs::remove_file(cache.path().join("new").join(format!("{}.gz", NAMES[1]))).unwrap();
    assert_small(&load_with(&request(DatasetName::Mnist, None), &sources, &Silent).unwrap());
    assert_eq!(server.asked.lock().unwrap().len(), 5);
}

/// Leaves `part` of the training images behind, as a killed run does, and fetches.
fn with_part(part: &[u8], answer: Answer) -> Vec<Asked> {
    let cache = TempDir::new().unwrap();
    fs::write(cache.path().join(format!("{}.gz.part", NAMES[0])), part).unwrap();
    let server = serve(packed(), answer);
    let data = load_with(&request(DatasetName::Mnist, None), &sources(cache.path(), &[&server.url]), &Silent).unwrap();
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

#[cfg(unix)]
#[test]
fn a_part_that_is_a_link_is_not_followed() {
    for target in ["mine", "absent"] {
        let cache = TempDir::new().unwrap();
        let (mine, part) = (cache.path().join("mine"), cache.path().join(format!("{}.gz.part", NAMES[0])));
        fs::write(&mine, "mine").unwrap();
        std::os::unix::fs::symlink(target, &part).unwrap();
        let server = serve(packed(), ranges);
        let sources = sources(cache.path(), &[&server.url]);
        let error = load_with(&request(DatasetName::Mnist, None), &sources, &Silent).unwrap_err().to_string();
        assert!(error.contains(".gz.part") && error.contains("it is no regular file; remove it"), "{error}");
        assert_eq!(fs::read(&mine).unwrap(), b"mine");
        assert!(fs::read_link(&part).unwrap() == std::path::Path::new(target) && !cache.path().join("absent").exists());
    }
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
    assert_small(&load_with(&request(DatasetName::Mnist, None), &sources, &Silent).unwrap());
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
    let message = message(load_with(&request(DatasetName::Mnist, None), &only, &Silent));
    assert!(message.contains("SHA-256") && message.contains("127.0.0.1:") && message.contains(NAMES[0]), "{message}");
    assert_eq!(names_in(cache.path()), Vec::<String>::new());
    // Another mirror has it.
    let good = serve(packed(), ranges);
    let both = sources(cache.path(), &[&server.url, &good.url]);
    assert_small(&load_with(&request(DatasetName::Mnist, None), &both, &Silent).unwrap());
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
    message(load_with(&request(DatasetName::Mnist, None), &strict, &Silent));
    let mut lenient = strict.clone();
    lenient.files.iter_mut().for_each(|file| file.gz_sha256 = None);
    assert_small(&load_with(&request(DatasetName::Mnist, None), &lenient, &Silent).unwrap());

    let mut altered = small();
    altered[0][20] ^= 1;
    let server = serve(altered.map(|file| gz(&file)), ranges);
    let other = TempDir::new().unwrap();
    let altered = Sources { mirrors: vec![server.url.clone()], cache_dir: Some(other.path().to_owned()), ..lenient };
    let message = message(load_with(&request(DatasetName::Mnist, None), &altered, &Silent));
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
        let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &Silent));
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
    let sources = Sources {
        stalled_after: Duration::from_millis(200),
        least_bytes_per_s: 1,
        ..sources(cache.path(), &[&server.url])
    };
    let start = Instant::now();
    let message = message(load_with(&request(DatasetName::Mnist, None), &sources, &Silent));
    assert!(message.contains("after 2"), "{message}");
    assert!(start.elapsed() < Duration::from_secs(8));
}

#[test]
fn a_download_that_trickles_ends() {
    /// A byte now and then, which is never a stall.
    fn trickles(stream: &mut TcpStream, body: &[u8], start: Option<usize>, _count: usize) -> std::io::Result<()> {
        let start = start.unwrap_or(0);
        let range = format!("Content-Range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len());
        head(stream, "206 Partial Content", body.len() - start, &range)?;
        body[start..].iter().try_for_each(|byte| {
            std::thread::sleep(Duration::from_millis(10));
            stream.write_all(&[*byte])
        })
    }
    let cache = TempDir::new().unwrap();
    let (slow, good) = (serve(packed(), trickles), serve(packed(), ranges));
    // Whatever its size, a file has this long: less than it takes byte by byte.
    let hurried = |mirrors: &[&str]| Sources {
        stalled_after: Duration::from_millis(100),
        least_bytes_per_s: u64::MAX,
        ..sources(cache.path(), mirrors)
    };
    let message = message(load_with(&request(DatasetName::Mnist, None), &hurried(&[&slow.url]), &Silent));
    assert!(message.contains("too slow") && message.contains(" bytes in 0.4 s"), "{message}");
    assert_eq!(slow.asked.lock().unwrap().len(), 1, "it would be no faster the next time");
    // Another mirror goes on where it had come to.
    let both = hurried(&[&slow.url, &good.url]);
    assert_small(&load_with(&request(DatasetName::Mnist, None), &both, &Silent).unwrap());
    assert!(good.asked.lock().unwrap()[0].1.is_some());
}

#[test]
fn a_password_is_never_shown() {
    let refused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mirrors = [
        format!("http://me:secret@{refused}/"),
        "https://me:secret@mirror.invalid/".to_owned(),
        "https://me:sec/ret@mirror.invalid/".to_owned(),
        "me:secret@mirror.invalid".to_owned(),
        "http://me:secret@[::1".to_owned(),
        "https://me:s;e(cret@mirror.invalid/".to_owned(),
    ];
    let all: Vec<&str> = mirrors.iter().map(String::as_str).collect();
    for mirrors in all.iter().map(std::slice::from_ref).chain([&all[..]]) {
        let cache = TempDir::new().unwrap();
        let sources = sources(cache.path(), mirrors);
        let text = message(load_with(&request(DatasetName::Mnist, None), &sources, &Silent));
        let notice = load_with(&request(DatasetName::Auto, None), &sources, &Silent).unwrap().notice.unwrap();
        let location = locate_mnist_with(&request(DatasetName::Auto, None), &sources);
        // The cache's own random name may have "sec" in it.
        let cache = cache.path().to_str().unwrap();
        for shown in [text, notice, location.to_string(), serde_json::to_string(&location).unwrap()] {
            let shown = shown.replace(cache, "CACHE");
            assert!(!["me:", "sec", "ret@"].iter().any(|part| shown.contains(part)), "{shown}");
        }
    }
}

#[test]
fn what_keeps_from_the_network_is_one_short_sentence() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = format!("http://{closed}/");
    let cache = TempDir::new().unwrap();
    let both = sources(cache.path(), &[&refused, &refused]);
    let message = message(load_with(&request(DatasetName::Mnist, None), &both, &Silent));
    assert!(message.contains(&format!("({closed}, {closed}: connection refused)")), "{message}");
    let notice = load_with(&request(DatasetName::Auto, None), &both, &Silent).unwrap().notice.unwrap();
    let said = "generated digits stand in for MNIST, which could not be downloaded (connection refused); \
                --data-dir takes its files";
    assert_eq!(notice, said);
}

#[test]
fn auto_decides_soon_without_a_network() {
    fn silent(_stream: &mut TcpStream, _body: &[u8], _start: Option<usize>, _count: usize) -> std::io::Result<()> {
        std::thread::sleep(Duration::from_secs(10));
        Ok(())
    }
    // A port without a listener, a server that says nothing, an address that leads nowhere, a name that means
    // nothing.
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
        let data = load_with(&request(DatasetName::Auto, None), &sources(cache.path(), &mirrors), &Silent).unwrap();
        // Less than the silent server's silence, which nothing here waits for.
        assert!(start.elapsed() < Duration::from_secs(9), "{mirrors:?}: {:?}", start.elapsed());
        assert_eq!(data.name, DatasetName::Digits);
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
    let message =
        message(load_with(&request(DatasetName::Mnist, None), &sources(&file.join("cache"), &[&server.url]), &Silent));
    assert!(message.contains("cannot write to the cache") && message.contains("VRAMLAB_CACHE"), "{message}");
}
