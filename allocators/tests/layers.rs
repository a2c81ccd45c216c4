//! The layers of the library: a module names only what lies below it.
#![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// From the ground up. Modules of one line may name each other.
const LAYERS: [&[&str]; 9] = [
    &["budget", "bytes", "input", "ordered", "output", "ranges", "settings", "steps", "sync"],
    &["device"],
    &["contract"],
    &["client", "space"],
    &["policy"],
    &["backends"],
    &["instruments"],
    &["histories"],
    &["testing"],
];

fn layer(module: &str) -> Option<usize> {
    LAYERS.iter().position(|layer| layer.contains(&module))
}

fn collect(folder: &Path, out: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            collect(&path, out);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

/// A file's code without comments and without its tests, which may use what they like.
fn code(text: &str) -> String {
    let tests = text.find("#[cfg(test)]\nmod tests {").unwrap_or(text.len());
    text[..tests].lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// What follows each `crate::` in a piece of code, up to the end of the word; a list in braces gives each of its words.
fn named(code: &str) -> Vec<String> {
    let mut out = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let rest = &code[at + "crate::".len()..];
        if let Some(list) = rest.strip_prefix('{') {
            let list = &list[..list.find('}').unwrap_or(list.len())];
            out.extend(list.split(',').map(|item| item.trim().split("::").next().unwrap_or("").to_owned()));
        } else {
            out.push(rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect());
        }
    }
    out
}

#[test]
fn modules_name_only_what_lies_below_them() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    collect(&source, &mut files);
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let name = file.strip_prefix(&source).unwrap().to_string_lossy().replace('\\', "/");
        // The root names everything; files that are tests as a whole name what they test.
        if name == "lib.rs" || name.contains("/tests") || name.ends_with("/models.rs") {
            continue;
        }
        let module = name.split(['/', '.']).next().unwrap();
        let own = layer(module).unwrap_or_else(|| panic!("{name} belongs to no layer"));
        for other in named(&code(&fs::read_to_string(&file).unwrap())) {
            match layer(&other) {
                Some(theirs) if theirs <= own => {}
                Some(_) => found.push(format!("{name}, of {module}, names {other}, which lies above it")),
                None => found.push(format!("{name} names crate::{other}: name the module that it is from")),
            }
        }
    }
    found.sort();
    found.dedup();
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_module_has_its_layer() {
    let root = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let modules: Vec<&str> = root
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ").or(line.strip_prefix("mod "))?.strip_suffix(';'))
        .collect();
    assert!(modules.len() > 8, "{modules:?}");
    for module in modules {
        assert!(layer(module).is_some(), "{module}");
    }
}

#[test]
fn what_a_piece_of_code_names_is_found() {
    let text = "use crate::{budget::Claim, device};\nfn a(b: crate::contract::Block) {}\n// crate::histories\n";
    assert_eq!(named(&code(text)), ["budget", "device", "contract"]);
}

#[test]
fn the_suite_is_compiled_by_tests_alone() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = vec![source.join("testing.rs")];
    collect(&source.join("testing"), &mut files);
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let code = code(&text);
        let lines: Vec<&str> = code.lines().map(str::trim).collect();
        for pair in lines.windows(2) {
            let words = pair[1].trim_start_matches("pub(super) ").trim_start_matches("pub ");
            let is_function = words.starts_with("fn ") || words.starts_with("const fn ");
            assert!(!is_function || pair[0] == "#[inline]", "{}: `{}` is not `#[inline]`", file.display(), pair[1]);
        }
    }
}

/// The methods of a trait, each as the text from `fn` to its `;` or `{`.
fn methods<'a>(text: &'a str, name: &str) -> Vec<&'a str> {
    let start = text.find(&format!("pub trait {name}")).or(text.find(&format!("pub unsafe trait {name}")));
    let body = &text[start.unwrap_or_else(|| panic!("there is no trait {name}"))..];
    let body = &body[..body.find("\n}\n").unwrap()];
    let ends = |at: usize| at + body[at..].find([';', '{']).unwrap() + 1;
    body.match_indices("    fn ")
        .chain(body.match_indices("    unsafe fn "))
        .map(|(at, _)| &body[at..ends(at)])
        .collect()
}

#[test]
fn a_method_that_is_added_to_a_driver_cannot_be_forgotten_by_a_wrapper() {
    // A method without a default is missed by the compiler where nobody writes it.
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/device");
    let (own, graph) = (source.with_extension("rs"), source.join("graph.rs"));
    for (name, file, least) in
        [("Driver", &own, 27), ("PoolDriver", &own, 9), ("VmmDriver", &own, 8), ("GraphDriver", &graph, 7)]
    {
        let text = fs::read_to_string(file).unwrap();
        let methods = methods(&text, name);
        assert!(methods.len() >= least, "{name}: {methods:#?}");
        let with_default: Vec<_> = methods.iter().filter(|method| method.ends_with('{')).collect();
        assert!(with_default.is_empty(), "{name} has methods with a default: {with_default:#?}");
    }
    // And there is one wrapper: the others are devices.
    let mut files = Vec::new();
    collect(source.parent().unwrap(), &mut files);
    let mut found = Vec::new();
    for file in files {
        let text = code(&fs::read_to_string(&file).unwrap());
        found.extend(text.lines().filter_map(|line| {
            let (_, implementer) = line.split_once(" Driver for ").filter(|(before, _)| before.contains("impl"))?;
            Some(implementer.trim_end_matches(" {").to_owned())
        }));
    }
    found.sort();
    assert_eq!(found, ["CudaDriver", "HookedDriver<H>", "NullDriver", "SimDriver"], "a wrapper is a `Hook`");
}
