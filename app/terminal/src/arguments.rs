//! Command-line arguments for allocators (`NAME:key=value,...`, one or a list), formats and shards. The names come from the library.

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

/// The command-line name of a value.
#[must_use]
pub fn name(value: impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The allocators given in one option.
#[derive(Clone, Debug, PartialEq)]
pub struct Selections(pub Vec<Selection>);

impl std::str::FromStr for Selections {
    type Err = SelectionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_list(text).map(Self)
    }
}

/// Parses a `T`, and lists every allocator in help.
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

/// Parser for one allocator.
#[must_use]
pub fn allocator() -> impl TypedValueParser<Value = Selection> {
    Named::<Selection>(std::marker::PhantomData)
}

/// Parser for a list of allocators; the option may be repeated.
#[must_use]
pub fn allocators() -> impl TypedValueParser<Value = Selections> {
    Named::<Selections>(std::marker::PhantomData)
}

/// Parser for a list of allocators of another type, such as one that also takes allocators of host memory.
#[must_use]
pub fn allocators_as<T>() -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr<Err = SelectionError> + Clone + Send + Sync + 'static,
{
    Named::<T>(std::marker::PhantomData)
}

/// An allocator's text as a column heading that can wrap before each setting.
#[must_use]
pub fn heading(text: &str) -> String {
    match text.split_once(':') {
        Some((name, settings)) => format!("{name}: {}", settings.replace(',', ", ")),
        None => text.to_owned(),
    }
}

/// The allocators given in an option; without it, the default comparison.
#[must_use]
pub fn chosen(given: &[Selections]) -> Vec<Selection> {
    if given.is_empty() {
        return compared().into_iter().map(Selection::of).collect();
    }
    given.iter().flat_map(|list| list.0.iter().cloned()).collect()
}

/// Parser for the name of an [`Export`]; help lists all.
#[must_use]
pub fn export() -> impl TypedValueParser<Value = Export> {
    let values = Export::ALL.map(|export| PossibleValue::new(export.name()).help(export.summary()));
    PossibleValuesParser::new(values).map(|name| {
        // PossibleValuesParser has refused every other name.
        Export::ALL.into_iter().find(|export| export.name() == name).unwrap_or(Export::Snapshot)
    })
}

/// The arguments of the command `completions`.
#[derive(Clone, Debug, Args)]
pub struct Completions {
    /// Shell, as in: source <(PROGRAM completions bash)
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints a shell completion script for a program.
///
/// # Errors
/// As [`print_json`](crate::print_json).
pub fn completions(args: &Completions, mut program: Command) -> Result<()> {
    let name = program.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, name, &mut script);
    crate::write_out(&String::from_utf8_lossy(&script))
}

/// A share of a list: every N-th entry, starting with the K-th.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// K, from 1.
    pub number: usize,
    /// N, the number of shards.
    pub of: usize,
}

impl Shard {
    /// Whether the shard contains the entry at an index.
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
            _ => Err("write K/N with K from 1 to N, such as 2/8".into()),
        }
    }
}
