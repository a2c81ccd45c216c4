//! Converts a history: `cargo run --release -p allocators --example convert_trace IN FORMAT OUT`, where FORMAT is
//! `snapshot`, `snapshot-json`, `perfetto`, `rmm` or `minimalloc`.

use allocators::trace::{Ending, Export, ReadError, ReadOptions, read};
use std::path::Path;
use std::process::ExitCode;

fn convert(from: &Path, export: Export, to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let mut writer = export.create(to)?;
    let summary = read(from, &ReadOptions::default(), &mut |event| writer.event(&event).map_err(ReadError::stop))?;
    let devices = u16::try_from(summary.events.len())?;
    let settings = Some(&summary.allocator_settings);
    writer.finish(&Ending { segments: &summary.segments, allocator_settings: settings, devices })?;
    println!("{} events from {} to {}", summary.all_events(), from.display(), to.display());
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [from, format, to] = arguments.as_slice() else {
        eprintln!("usage: convert_trace IN FORMAT OUT");
        return ExitCode::from(2);
    };
    let Some(export) = Export::ALL.into_iter().find(|export| export.name() == format) else {
        eprintln!("error: '{format}' is no format: {}", Export::ALL.map(Export::name).join(", "));
        return ExitCode::from(2);
    };
    match convert(Path::new(from), export, Path::new(to)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}
