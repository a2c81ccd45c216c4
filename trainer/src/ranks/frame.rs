//! Messages between ranks: a kind, a length, bytes.

use std::io::{self, Read, Write};

vramlab::device::named! {
    /// Kind of a message.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Kind {
        /// A rank introduces itself to rank 0.
        Hello "hello",
        /// Rank 0 has met all ranks.
        Welcome "welcome",
        /// A part of what the ranks compute together.
        Data "data",
        /// A rank failed.
        Failure "failure",
        /// The sender ends as it should.
        Bye "bye",
        /// The sender is alive.
        Alive "alive",
        /// A rank was told by a signal to end.
        StopRequest "stop request",
        /// Rank 0 asks how far a rank is, and it waits there.
        Hold "hold",
        /// A rank waits before this step.
        Held "held",
        /// All ranks end before this step.
        StopBefore "stop before",
    }
}

/// Longer than any message: gradients of 2^31 values.
const MOST_BYTES: u64 = 1 << 33;

/// Writes a message.
///
/// # Errors
/// Errors of the connection.
pub(super) fn write(out: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let mut header = [0; 9];
    // CAST: a few kinds.
    header[0] = kind as u8;
    header[1..].copy_from_slice(&(payload.len() as u64).to_le_bytes());
    out.write_all(&header)?;
    out.write_all(payload)?;
    out.flush()
}

/// Reads a message of at most `most` bytes.
///
/// # Errors
/// Errors of the connection, and `InvalidData` for what is not a message.
pub(super) fn read(input: &mut impl Read, most: u64) -> io::Result<(Kind, Vec<u8>)> {
    let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not a message of a rank");
    let mut header = [0; 9];
    input.read_exact(&mut header)?;
    let kind = *Kind::ALL.get(usize::from(header[0])).ok_or_else(invalid)?;
    let length = header[1..].iter().rev().fold(0, |length, byte| length << 8 | u64::from(*byte));
    if length > most.min(MOST_BYTES) {
        return Err(invalid());
    }
    let mut payload = Vec::new();
    // Grows with what arrives, so that a wrong length takes no memory.
    input.take(length).read_to_end(&mut payload)?;
    if payload.len() as u64 == length { Ok((kind, payload)) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        for kind in Kind::ALL {
            write(&mut bytes, kind, kind.name().as_bytes()).unwrap();
        }
        let mut input = &bytes[..];
        for kind in Kind::ALL {
            assert_eq!(read(&mut input, 100).unwrap(), (kind, kind.name().as_bytes().to_vec()));
        }
        assert!(input.is_empty());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let cases: [(&[u8], io::ErrorKind); 5] = [
            (b"", io::ErrorKind::UnexpectedEof),
            (b"GET / HTTP/1.1\r\n\r\n", io::ErrorKind::InvalidData),
            (&[2, 255, 255, 255, 255, 255, 255, 255, 255], io::ErrorKind::InvalidData),
            (&[2, 101, 0, 0, 0, 0, 0, 0, 0], io::ErrorKind::InvalidData),
            (&[2, 9, 0, 0, 0, 0, 0, 0, 0, 1, 2], io::ErrorKind::UnexpectedEof),
        ];
        for (bytes, kind) in cases {
            let error = read(&mut &bytes[..], 100).unwrap_err();
            assert_eq!(error.kind(), kind, "{bytes:?}");
        }
    }
}
