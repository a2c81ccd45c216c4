//! The trainer knows the backend, and it changes nothing but where memory lies.

use std::process::Command;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bump-allocator"))
}

fn trainer(arguments: &[&str]) -> String {
    let output = program().args(arguments).output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it writes text")
}

/// What a run computed: the losses of each epoch, which are sums over its steps, to the last bit.
fn computed(record: &str) -> Vec<String> {
    let record: serde_json::Value = serde_json::from_str(record).expect("a record is JSON");
    let epochs = record["epochs"].as_array().expect("a record has epochs");
    let losses: Vec<String> =
        epochs.iter().map(|epoch| format!("{} {}", epoch["train_loss"], epoch["val_loss"])).collect();
    assert!(!losses.is_empty() && !losses.join(" ").contains("null"), "{losses:?}");
    losses
}

#[test]
fn losses_are_those_of_the_default_allocator() {
    let run = |allocator: &str| {
        trainer(&["--device", "sim", "--dataset", "iris", "--epochs", "2", "--json", "--alloc", allocator])
    };
    let usual = computed(&run("caching"));
    for (allocator, name) in [("bump:segment=4M", "bump"), ("snug", "snug"), ("worst", "worst"), ("buddy", "buddy")] {
        let record = run(allocator);
        let read: serde_json::Value = serde_json::from_str(&record).expect("a record is JSON");
        assert_eq!(read["settings"]["allocator"], name, "the record names the allocator");
        assert_eq!(computed(&record), usual, "{name}");
    }
}

#[test]
fn the_command_line_knows_its_settings() {
    let output = program().args(["--device", "sim", "--alloc", "bump:segmant=4M"]).output().expect("the program runs");
    assert_eq!(output.status.code(), Some(2), "a wrong setting is a mistake of the command line");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("bump") && said.contains("did you mean 'segment'"), "{said}");
}
