//! Failures in one line: the last call, its outcome, and the rule that the outcome breaks.

use std::cell::Cell;
use std::fmt::{self, Debug, Display};
use vramlab_device::{Bytes, StreamId};

/// Maximum characters of an outcome in the line.
const LONGEST: usize = 240;

/// A call of the allocator.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    /// None yet.
    Nothing,
    /// An allocation.
    Allocate { bytes: u64, stream: StreamId },
    /// A free.
    Free { addr: u64, bytes: u64, stream: StreamId },
    /// A trim.
    Trim { keep: u64 },
    /// A limit.
    Limit { bytes: Option<u64> },
}

thread_local! {
    static ASKED: Cell<Asked> = const { Cell::new(Asked::Nothing) };
}

impl Asked {
    /// Notes this as the thread's last call.
    pub(crate) fn note(self) {
        ASKED.set(self);
    }
}

impl Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Nothing => f.write_str("none"),
            Self::Allocate { bytes, stream } => write!(f, "{} on stream {}", Bytes(bytes), stream.get()),
            Self::Free { addr, bytes, stream } => {
                write!(f, "free {} at {addr:#x} on stream {}", Bytes(bytes), stream.get())
            }
            Self::Trim { keep } => write!(f, "trim to {}", Bytes(keep)),
            Self::Limit { bytes: Some(bytes) } => write!(f, "limit of {}", Bytes(bytes)),
            Self::Limit { bytes: None } => f.write_str("no limit"),
        }
    }
}

/// The text in one line, shortened where it is long.
fn line(text: &str) -> String {
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match words.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{} …", &words[..end]),
        None => words,
    }
}

/// Fails the check.
///
/// # Panics
/// Always.
#[cold]
#[track_caller]
pub(crate) fn fail(came: &str, rule: &str) -> ! {
    panic!("request: {}; result: {}; rule: {}", ASKED.get(), line(came), line(rule))
}

/// Fails the check unless the condition is true. The text is the rule; without it the expression is.
macro_rules! demand {
    ($holds:expr $(,)?) => {
        if !$holds {
            $crate::demand::fail("the contrary", stringify!($holds));
        }
    };
    ($holds:expr, came = $came:expr, $($rule:tt)+) => {
        if !$holds {
            $crate::demand::fail(&$came.to_string(), &format!($($rule)+));
        }
    };
    ($holds:expr, $($rule:tt)+) => {
        if !$holds {
            $crate::demand::fail(concat!("the contrary of ", stringify!($holds)), &format!($($rule)+));
        }
    };
}

/// Fails the check unless the first value equals the second, which is the expected one.
macro_rules! demand_eq {
    ($came:expr, $expected:expr $(,)?) => {
        demand_eq!($came, $expected, "{} is {}", stringify!($came), stringify!($expected))
    };
    ($came:expr, $expected:expr, $($rule:tt)+) => {
        match (&$came, &$expected) {
            (came, expected) => {
                if *came != *expected {
                    let text = format!("{} = {came:?}, not {expected:?}", stringify!($came));
                    $crate::demand::fail(&text, &format!($($rule)+));
                }
            }
        }
    };
}

pub(crate) use {demand, demand_eq};

/// Results of calls that must succeed, or must be refused.
pub(crate) trait Outcome<T, E> {
    /// The value; fails the check where there is none.
    fn granted(self) -> T;

    /// The error; fails the check where there is a value.
    fn refused(self) -> E
    where
        T: Debug;
}

impl<T, E: Display> Outcome<T, E> for Result<T, E> {
    #[track_caller]
    fn granted(self) -> T {
        self.unwrap_or_else(|error| fail(&format!("an error: {error}"), "the call succeeds"))
    }

    #[track_caller]
    fn refused(self) -> E
    where
        T: Debug,
    {
        match self {
            Ok(value) => fail(&format!("{value:?}"), "the call is refused"),
            Err(error) => error,
        }
    }
}

impl<T> Outcome<T, ()> for Option<T> {
    #[track_caller]
    fn granted(self) -> T {
        self.unwrap_or_else(|| fail("nothing", "there is a value"))
    }

    #[track_caller]
    fn refused(self)
    where
        T: Debug,
    {
        if let Some(value) = self {
            fail(&format!("{value:?}"), "there is no value");
        }
    }
}
