//! Device profiles as files.

use anyhow::{Context, Result};
use serde_json::Value;
use std::path::Path;
use vramlab::Profile;
use vramlab::output::OutputFile;

/// Reads a profile; without a path the built-in one.
pub(crate) fn read(path: Option<&Path>) -> Result<Profile> {
    let Some(path) = path else { return Ok(Profile::h200()) };
    Ok(Profile::read(path)?)
}

/// Writes a profile after the checks that a reader makes.
pub(crate) fn write(profile: &Profile, out: OutputFile) -> Result<()> {
    let mut text = String::new();
    layout(&serde_json::to_value(profile)?, 0, &mut text);
    text.push('\n');
    Profile::from_json(&text).context("the measurements give a profile that cannot be used")?;
    Ok(out.fill(text)?)
}

/// JSON with one line for each cost: objects are spread out two levels deep, deeper ones take one line.
fn layout(value: &Value, depth: usize, out: &mut String) {
    let Value::Object(fields) = value else { return *out += &value.to_string() };
    if depth == 2 {
        return *out += &value.to_string();
    }
    *out += "{\n";
    for (number, (key, field)) in fields.iter().enumerate() {
        *out += &"  ".repeat(depth + 1);
        *out += &format!("{}: ", Value::from(key.as_str()));
        layout(field, depth + 1, out);
        *out += if number + 1 < fields.len() { ",\n" } else { "\n" };
    }
    *out += &"  ".repeat(depth);
    out.push('}');
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::output::Existing;

    #[test]
    fn what_is_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("profile.json");
        write(&Profile::h200(), OutputFile::create(&path, Existing::Refuse).unwrap()).unwrap();
        assert_eq!(read(Some(&path)).unwrap(), Profile::h200());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.lines().all(|line| line.len() < 300), "a cost should be one line of readable length");
    }
}
