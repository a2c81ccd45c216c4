//! Segments and the pools that they belong to.

/// A segment, or the mapped parts of an expandable one that lie side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its size.
    pub bytes: u64,
    /// Its stream.
    pub stream: u64,
    /// Whether small requests are served from it.
    pub small: bool,
    /// Whether it grows and shrinks by parts that are mapped.
    pub expandable: bool,
}

impl Segment {
    /// The pool that it belongs to.
    #[must_use]
    pub fn pool(&self) -> Pool {
        Pool { stream: self.stream, small: self.small }
    }
}

/// Segments from which a request may be served: those of a stream, for small requests or for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pool {
    /// The stream.
    pub stream: u64,
    /// Whether it is the one for small requests.
    pub small: bool,
}
