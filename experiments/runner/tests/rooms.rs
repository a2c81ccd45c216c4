//! The rooms (top-level directories) of the repository: `allocators/` and `app/` use no room above them.
//!
//! Cargo refuses cycles between crates and nothing else. This test reads manifests (also of packages outside of the
//! workspace), paths in Rust sources and strings in the Python package.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// A room, and the other rooms that it may use.
const ROOMS: [(&str, &[&str]); 4] = [
    ("allocators", &[]),
    ("app", &["allocators"]),
    ("kernels", &["allocators"]),
    ("trainer", &["allocators", "app", "kernels"]),
];

/// Rooms that none of those may use.
const ABOVE: [&str; 2] = ["experiments", "analysis"];

/// Data that tests below read: recordings, and the page that describes what programs write.
const DATA: [&str; 2] = ["experiments/histories", "analysis/schema.md"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// All files below a directory with one of these endings, except build outputs.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() && !["target", "__pycache__", "prebuilt"].contains(&name.as_str()) {
                folders.push(path);
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                paths.push(path);
            }
        }
    }
    paths
}

/// A path without `.` and `..`, resolved by its text, whether or not it exists.
fn plain(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

/// The room of a path in the repository, and the path from its root.
fn room(path: &Path) -> Option<(String, String)> {
    let inside = plain(path).strip_prefix(root()).ok()?.to_owned();
    let first = inside.components().next()?.as_os_str().to_string_lossy().into_owned();
    Some((first, inside.to_string_lossy().into_owned()))
}

/// The reason why a file of one room may not use `to`.
fn refused(from: &str, file: &Path, to: &Path) -> Option<String> {
    let (at, inside) = room(to)?;
    let known = ROOMS.iter().map(|(name, _)| *name).chain(ABOVE).any(|name| name == at);
    let allowed = ROOMS.iter().find(|(name, _)| *name == from).unwrap().1;
    let data = file.components().any(|part| part.as_os_str() == "tests" || part.as_os_str() == "tests.rs")
        || file.components().any(|part| part.as_os_str() == "benches")
        || std::fs::read_to_string(file).is_ok_and(|text| text.contains("#[cfg(test)]"));
    if !known
        || at == from
        || allowed.contains(&at.as_str())
        || data && DATA.iter().any(|name| inside.starts_with(name))
    {
        return None;
    }
    Some(format!("{} uses {inside}: {from} may use {allowed:?}", file.strip_prefix(root()).unwrap().display()))
}

/// The directory of each dependency of a manifest, of all kinds and targets.
fn dependencies(manifest: &Path, workspace: &BTreeMap<String, PathBuf>) -> Vec<PathBuf> {
    fn walk(table: &toml::Table, inside: bool, visit: &mut dyn FnMut(&str, &toml::Value)) {
        for (key, value) in table {
            let dependencies = ["dependencies", "dev-dependencies", "build-dependencies"].contains(&key.as_str());
            match value {
                toml::Value::Table(table) if dependencies => table.iter().for_each(|(name, value)| visit(name, value)),
                toml::Value::Table(table) if !inside || key != "workspace" => walk(table, true, visit),
                _ => {}
            }
        }
    }
    let table: toml::Table = std::fs::read_to_string(manifest).unwrap().parse().unwrap();
    let folder = manifest.parent().unwrap();
    let mut out = Vec::new();
    walk(&table, false, &mut |name, value| {
        if let Some(path) = value.get("path").and_then(toml::Value::as_str) {
            out.push(plain(&folder.join(path)));
        } else if value.get("workspace").is_some() {
            out.extend(workspace.get(name).cloned());
        }
    });
    if let Some(script) = table.get("package").and_then(|package| package.get("build")).and_then(toml::Value::as_str) {
        out.push(plain(&folder.join(script)));
    }
    out
}

/// Paths of the workspace's dependencies.
fn workspace() -> BTreeMap<String, PathBuf> {
    let table: toml::Table = std::fs::read_to_string(root().join("Cargo.toml")).unwrap().parse().unwrap();
    let all = table["workspace"]["dependencies"].as_table().unwrap();
    let with_path = all.iter().filter_map(|(name, value)| Some((name.clone(), value.get("path")?.as_str()?)));
    with_path.map(|(name, path)| (name, root().join(path))).collect()
}

#[test]
fn no_package_depends_on_a_room_above() {
    let workspace = workspace();
    assert!(workspace.len() > 5, "{workspace:?}");
    let mut problems = Vec::new();
    let mut count = 0;
    for (name, _) in ROOMS {
        for manifest in files(&root().join(name), &["Cargo.toml"]) {
            let all = dependencies(&manifest, &workspace);
            count += all.len();
            problems.extend(all.iter().filter_map(|to| refused(name, &manifest, to)));
        }
    }
    assert!(count > 20, "only {count} dependencies were found");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn no_source_names_a_file_of_a_room_above() {
    let mut problems = Vec::new();
    let mut count = 0;
    for (name, _) in ROOMS {
        for file in files(&root().join(name), &[".rs"]) {
            let text = std::fs::read_to_string(&file).unwrap();
            let package = file.ancestors().find(|folder| folder.join("Cargo.toml").is_file()).unwrap();
            for line in text.lines().filter(|line| line.contains("\"") && line.contains("..")) {
                // Relative to the file or to the package: a path that leads outside of both is tested from both.
                for words in line.split('"').skip(1).step_by(2).filter(|words| words.contains("../")) {
                    let words = words.trim_start_matches('/');
                    count += 1;
                    let from = if line.contains("path =") || line.contains("include") {
                        file.parent().unwrap()
                    } else {
                        package
                    };
                    problems.extend(refused(name, &file, &from.join(words)));
                }
            }
        }
    }
    assert!(count > 20, "only {count} paths were found");
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn the_python_package_names_no_room_above() {
    let mut problems = Vec::new();
    let endings = [".py", ".toml", ".pth", ".cpp", ".h"];
    let sources = files(&root().join("app/python"), &endings);
    assert!(sources.len() > 20);
    for file in sources {
        let text = std::fs::read_to_string(&file).unwrap();
        for name in ABOVE.iter().chain(&["trainer", "kernels"]) {
            let quoted = [format!("\"{name}\""), format!("\"{name}/"), format!("../{name}/"), format!("{name}/src")];
            // Recordings are data, in tests.
            let lines = text.lines().filter(|line| quoted.iter().any(|words| line.contains(words)));
            let in_tests = file.components().any(|part| part.as_os_str() == "tests");
            let data = |line: &str| in_tests && line.contains("\"experiments\" / \"histories\"");
            problems.extend(lines.filter(|line| !data(line)).map(|line| format!("{}: {line}", file.display())));
        }
        if text.contains("vramlab_analysis") {
            problems.push(format!("{} names vramlab_analysis", file.display()));
        }
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn an_arrow_upward_is_noticed() {
    let file = root().join("app/cli/src/lib.rs");
    assert!(refused("app", &file, &root().join("trainer/src/lib.rs")).is_some());
    assert!(refused("app", &file, &root().join("app/cli/../../experiments/runner")).is_some());
    assert!(refused("app", &file, &root().join("allocators/src/lib.rs")).is_none());
    assert!(refused("app", &root().join("app/cli/tests/advise.rs"), &root().join("analysis/schema.md")).is_none());
    assert!(refused("app", &root().join("app/cli/tests/advise.rs"), &root().join("analysis/src")).is_some());
}
