//! How command lines name allocators (`NAME:key=value,...`, one or a list) and formats. The names are the library's lists.

use anyhow::Result;
use clap::builder::{PossibleValue, PossibleValuesParser, StringValueParser, TypedValueParser};
use clap::error::Error;
use clap::{Arg, Args, Command, ValueEnum};
use clap_complete::Shell;
use std::ffi::OsStr;
use std::fmt;
use std::str::FromStr;
use vramlab::Selection;
use vramlab::backends::{SelectionError, all, compared, parse_list};
use vramlab::histories::formats::Export;

/// A value of a list as it is written on the command line.
#[must_use]
pub fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// Allocators as one option names them.
#[derive(Clone, Debug, PartialEq)]
pub struct Selections(pub Vec<Selection>);

impl std::str::FromStr for Selections {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_list(text).map(Self)
    }
}

/// Reads a value as a `T`, and lists every allocator in help.
#[derive(Clone, Debug)]
struct Named<T>(std::marker::PhantomData<T>);

impl<T> TypedValueParser for Named<T>
where
    T: std::str::FromStr<Err = SelectionError> + Clone + Send + Sync + 'static,
{
    type Value = T;

    fn parse_ref(&self, command: &Command, argument: Option<&Arg>, value: &OsStr) -> Result<T, Error> {
        StringValueParser::new().try_map(|text| text.parse::<T>()).parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(all().into_iter().map(|backend| PossibleValue::new(backend.name).help(backend.summary))))
    }
}

/// Takes one allocator.
#[must_use]
pub fn allocator() -> impl TypedValueParser<Value = Selection> {
    Named::<Selection>(std::marker::PhantomData)
}

/// Takes a list of allocators; the option may be given several times.
#[must_use]
pub fn allocators() -> impl TypedValueParser<Value = Selections> {
    Named::<Selections>(std::marker::PhantomData)
}

/// An allocator's text as the heading of a column: it can be broken before each setting.
#[must_use]
pub fn heading(text: &str) -> String {
    match text.split_once(':') {
        Some((name, settings)) => format!("{name}: {}", settings.replace(',', ", ")),
        None => text.to_owned(),
    }
}

/// The allocators that an option named; if it was not given, those that are worth a column each.
#[must_use]
pub fn chosen(given: &[Selections]) -> Vec<Selection> {
    if given.is_empty() {
        return compared().into_iter().map(Selection::of).collect();
    }
    given.iter().flat_map(|list| list.0.iter().cloned()).collect()
}

/// Takes the name of an [`Export`]; help lists them all.
#[must_use]
pub fn export() -> impl TypedValueParser<Value = Export> {
    let values = Export::ALL.map(|export| PossibleValue::new(export.name()).help(export.summary()));
    PossibleValuesParser::new(values).map(|name| {
        // The parser before has refused every other name.
        Export::ALL.into_iter().find(|export| export.name() == name).unwrap_or(Export::Snapshot)
    })
}

/// The arguments of a program's `completions`.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// The shell that is to read it, as in: source <(PROGRAM completions bash)
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the shell's script for a program's grammar.
///
/// # Errors
/// As [`print_json`](crate::print_json).
pub fn completions(args: &Completions, mut program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    crate::write_out(&String::from_utf8_lossy(&script))
}

/// A share of the plan: every N-th run, beginning with the K-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// From 1.
    pub number: usize,
    /// How many shards there are.
    pub of: usize,
}

impl Shard {
    /// Whether the run of this number in the plan is its own.
    pub fn holds(self, index: usize) -> bool {
        index % self.of == self.number - 1
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.number, self.of)
    }
}

impl FromStr for Shard {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parts = text.split_once('/').and_then(|(k, n)| Some((k.parse().ok()?, n.parse().ok()?)));
        match parts {
            Some((number, of)) if (1..=of).contains(&number) => Ok(Self { number, of }),
            _ => Err("write K/N with K from 1 to N, as 2/8".into()),
        }
    }
}
