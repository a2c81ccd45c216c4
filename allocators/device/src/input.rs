//! Small files that a user names, such as profiles, specs and records: read as a whole, with a size limit.
//!
//! A name may refer to a device or a pipe that never ends, which is refused, and a compressed file may unpack to a thousand times
//! its size. A caller passes the maximum sensible size, and a longer file is refused in one line. Recordings are streamed instead,
//! within a [budget](crate::budget).

use crate::bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Seek, SeekFrom};
use std::path::Path;

/// Maximum size of a file that people write, such as a device profile or a spec: 1 MiB.
pub const WRITTEN: u64 = 1 << 20;

/// Maximum size of a JSON document that a program writes, such as the summary of a run: 16 MiB. In memory a document can take
/// thirty times its length.
pub const DOCUMENT: u64 = 16 << 20;

/// Maximum size of a table that a program writes, such as the steps of a run: 256 MiB.
pub const TABLE: u64 = 256 << 20;

/// The bytes of a file, at most `limit`.
///
/// # Errors
/// Those of [`open`], and [`ErrorKind::FileTooLarge`] for a longer file. The text is one line and does not name the file.
pub fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    read_whole(open(path)?, limit)
}

/// The text in a file of at most `limit` bytes.
///
/// # Errors
/// Those of [`read_bytes`], and [`ErrorKind::InvalidData`] for a file that is not UTF-8.
pub fn read_text(path: &Path, limit: u64) -> Result<String> {
    text(read_bytes(path, limit)?)
}

/// The text in a file, plain or compressed with gzip, at most `limit` bytes when it is unpacked.
///
/// # Errors
/// Those of [`read_text`], and the decoder's error for a damaged file.
pub fn read_unpacked(path: &Path, limit: u64) -> Result<String> {
    let mut file = BufReader::new(open(path)?);
    let packed = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
    text(if packed { read_whole(MultiGzDecoder::new(file), limit)? } else { read_whole(file, limit)? })
}

/// The last bytes of a file, at most `most`.
///
/// # Errors
/// Those of [`open`].
pub fn read_end(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut file = open(path)?;
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a regular file. Others are refused, and a pipe without a writer is not waited for.
///
/// # Errors
/// The operating system's error, [`ErrorKind::IsADirectory`], and [`ErrorKind::InvalidInput`] for pipes, devices and sockets.
pub fn open(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(target_os = "linux")]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path)?;
    refuse_special(&file.metadata()?, false)?;
    Ok(file)
}

/// Opens a regular file, or a pipe, whose reader must limit the size.
///
/// # Errors
/// The operating system's error, [`ErrorKind::IsADirectory`], and [`ErrorKind::InvalidInput`] for devices and sockets.
pub fn open_stream(path: &Path) -> Result<File> {
    // Before it is opened: opening a device may change it.
    refuse_special(&std::fs::metadata(path)?, true)?;
    let file = File::open(path)?;
    refuse_special(&file.metadata()?, true)?;
    Ok(file)
}

fn refuse_special(metadata: &Metadata, pipes: bool) -> Result<()> {
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(Error::new(ErrorKind::IsADirectory, "it is a directory; name a file in it"));
    }
    #[cfg(unix)]
    let (pipe, socket) = {
        use std::os::unix::fs::FileTypeExt;
        (kind.is_fifo(), kind.is_socket())
    };
    #[cfg(not(unix))]
    let (pipe, socket) = (false, false);
    if kind.is_file() || pipe && pipes {
        return Ok(());
    }
    let what = if pipe {
        "a pipe"
    } else if socket {
        "a socket"
    } else {
        "a device"
    };
    Err(Error::new(ErrorKind::InvalidInput, format!("it is {what}; name a regular file")))
}

/// An excerpt of a file's text for an error, with control characters escaped.
#[must_use]
pub fn excerpt(text: &str, most: usize) -> String {
    let mut out: String = text.chars().take(most).flat_map(char::escape_debug).collect();
    if text.chars().nth(most).is_some() {
        out.push_str("...");
    }
    out
}

fn read_whole(source: impl Read, limit: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    // CAST: a length in memory.
    if bytes.len() as u64 > limit {
        let text =
            format!("it is longer than {}, more than such a file has; check that it is the right one", Bytes(limit));
        return Err(Error::new(ErrorKind::FileTooLarge, text));
    }
    Ok(bytes)
}

/// A byte order mark, which editors on Windows put before text, is removed.
fn text(bytes: Vec<u8>) -> Result<String> {
    let mut text = String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not valid UTF-8"))?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use tempfile::TempDir;

    fn place() -> (TempDir, std::path::PathBuf) {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("file");
        (folder, path)
    }

    fn packed(bytes: &[u8], times: usize) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        (0..times).for_each(|_| encoder.write_all(bytes).unwrap());
        encoder.finish().unwrap()
    }

    #[test]
    fn what_is_no_longer_than_the_limit_is_read() {
        let (_folder, path) = place();
        std::fs::write(&path, "twelve bytes").unwrap();
        assert_eq!(read_text(&path, 12).unwrap(), "twelve bytes");
        let error = read_text(&path, 11).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::FileTooLarge);
        assert!(error.to_string().contains("is longer than 11 B"), "{error}");
        std::fs::write(&path, b"\xff").unwrap();
        assert_eq!(read_text(&path, 12).unwrap_err().kind(), ErrorKind::InvalidData);
        assert_eq!(read_bytes(path.parent().unwrap(), 12).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(read_bytes(&path.join("below"), 12).unwrap_err().kind(), ErrorKind::NotADirectory);
    }

    #[test]
    fn limit_applies_to_the_unpacked_size() {
        let (_folder, path) = place();
        std::fs::write(&path, packed(b"abc", 100)).unwrap();
        assert_eq!(read_unpacked(&path, 300).unwrap(), "abc".repeat(100));
        // 64 MiB in 64 KiB.
        std::fs::write(&path, packed(&vec![b'a'; 1 << 20], 64)).unwrap();
        assert!(std::fs::metadata(&path).unwrap().len() < 1 << 18);
        assert_eq!(read_unpacked(&path, WRITTEN).unwrap_err().kind(), ErrorKind::FileTooLarge);
        std::fs::write(&path, "plain").unwrap();
        assert_eq!(read_unpacked(&path, WRITTEN).unwrap(), "plain");
        std::fs::write(&path, "\u{feff}{}").unwrap();
        assert_eq!(read_text(&path, WRITTEN).unwrap(), "{}");
    }

    #[test]
    fn the_end_of_a_long_file_is_read_alone() {
        let (_folder, path) = place();
        std::fs::write(&path, "0123456789").unwrap();
        assert_eq!(read_end(&path, 4).unwrap(), b"6789");
        assert_eq!(read_end(&path, 400).unwrap(), b"0123456789");
    }

    #[cfg(unix)]
    #[test]
    fn devices_that_never_end_are_refused() {
        let read: [fn(&Path) -> Result<String>; 2] =
            [|path| read_text(path, WRITTEN), |path| read_unpacked(path, WRITTEN)];
        for read in read {
            let error = read(Path::new("/dev/zero")).unwrap_err();
            assert_eq!((error.kind(), error.to_string().contains("it is a device")), (ErrorKind::InvalidInput, true));
        }
        assert_eq!(open_stream(Path::new("/dev/zero")).unwrap_err().kind(), ErrorKind::InvalidInput);
        assert_eq!(read_end(Path::new("/dev/zero"), 1).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    /// Opening a pipe waits for its writer, which does not exist here.
    #[cfg(target_os = "linux")]
    #[test]
    fn pipes_are_refused_and_not_waited_for() {
        let (_folder, path) = place();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let (sent, heard) = std::sync::mpsc::channel();
        let pipe = path.clone();
        std::thread::spawn(move || sent.send(read_text(&pipe, WRITTEN).map_err(|error| error.kind())));
        let read = heard.recv_timeout(std::time::Duration::from_secs(60));
        if read.is_err() {
            // Lets the thread end.
            let _ = OpenOptions::new().write(true).open(&path);
        }
        assert_eq!(read.unwrap(), Err(ErrorKind::InvalidInput));
    }

    /// Files that the system generates when they are read have no size.
    #[cfg(target_os = "linux")]
    #[test]
    fn files_without_a_size_are_read_up_to_the_limit() {
        let path = Path::new("/proc/self/status");
        assert_eq!(std::fs::metadata(path).unwrap().len(), 0);
        assert!(read_text(path, WRITTEN).unwrap().contains("VmRSS"));
        assert_eq!(read_text(path, 16).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn excerpts_are_short_and_have_no_control_characters() {
        assert_eq!(excerpt("a\u{1b}[31m", 60), "a\\u{1b}[31m");
        assert_eq!(excerpt(&"x".repeat(1 << 20), 3), "xxx...");
    }
}
