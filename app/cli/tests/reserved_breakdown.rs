//! The breakdown of reserved memory is the same in `explain`, `report` and `replay`.

use crate::common::TestDir;
use crate::common::story::{BASE, MIB, Story, explain_json, part, script};
use base64::Engine as _;
use serde_json::{Value, json};
use std::io::Read as _;

const PARTS: [&str; 6] = ["requested", "internal", "pending", "hard", "stream", "soft"];

/// PyTorch's expandable segments in pages of 20 MiB: 900 MiB are free between two blocks when the last request maps more memory.
fn expandable() -> Story {
    let mut story = Story { settings: json!({"expandable_segments": true}), ..Story::default() };
    let mut mapped = 0;
    for (at, mib, end) in [(0, 90, 100), (90, 900, 1000), (990, 100, 1100), (1090, 905, 2000)] {
        if at == 1090 {
            story.free(90 * MIB, 900 * MIB, 0);
        }
        story.event("segment_map", BASE + mapped * MIB, (end - mapped) * MIB, 0, json!([]));
        story.alloc(at * MIB, mib * MIB, 0, json!([script(at, "main")]));
        mapped = end;
    }
    story
}

/// The last row of the breakdown over time in a page.
fn page_parts(page: &str) -> Vec<u64> {
    let element = |id: &str| {
        let text = page.split(&format!("id=\"{id}\">")).nth(1).unwrap();
        text.split("</script>").next().unwrap()
    };
    let data: Value = serde_json::from_str(element("data")).unwrap();
    let group = data["histories"][0]["ledger"]["group"].as_u64().unwrap();
    let packed = base64::engine::general_purpose::STANDARD.decode(element(&format!("numbers-{group}"))).unwrap();
    let mut bytes = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut bytes).unwrap();
    let mut bytes = bytes.into_iter();
    let mut varint = || {
        let (mut value, mut shift) = (0u64, 0);
        loop {
            let byte = bytes.next().unwrap();
            value |= u64::from(byte & 127) << shift;
            shift += 7;
            if byte < 128 {
                return value;
            }
        }
    };
    // The first column is the event. Each number is the difference from the previous one, its sign in the lowest bit.
    let mut column = || {
        let rows = varint();
        (0..rows).fold(0, |last: i64, _| {
            let step = varint();
            last + ((step >> 1).cast_signed() ^ -(step & 1).cast_signed())
        })
    };
    column();
    PARTS.map(|_| column().cast_unsigned()).to_vec()
}

#[test]
fn explain_report_and_replay_agree_on_expandable_segments() {
    let dir = TestDir::new();
    let file = dir.write("story.json", expandable().text());
    let explanation = explain_json(&dir, &[&file]);
    assert_eq!((&explanation["reserved"]["at"], &explanation["num_retries"]), (&json!("peak_reserved"), &json!(0)));
    let explained = PARTS.map(|name| part(&explanation, name)).to_vec();
    // Pages 100 to 980 MiB are free, and parts of three others.
    assert_eq!(explained, [1095, 0, 0, 25, 0, 880].map(|mib| mib * MIB));
    let rows = dir
        .run(&["replay", &file, "--alloc", "pytorch-expandable,remap", "--device", "null", "--plan", "off", "--json"])
        .rows();
    let replayed = PARTS.map(|name| rows[0]["ledger"][name].as_u64().unwrap()).to_vec();
    assert_eq!(replayed, explained);
    // Its pages are smaller, and it takes free ones before new ones.
    let total = |row: &Value| PARTS.iter().map(|name| row["ledger"][*name].as_u64().unwrap()).sum::<u64>();
    assert_eq!(json!(total(&rows[1])), rows[1]["ledger"]["reserved"]);
    dir.run(&["report", &file, "--alloc", "caching", "--plan", "off", "--advise", "off", "-o", "page.html"]).ok();
    let page = std::fs::read_to_string(dir.at("page.html")).unwrap();
    assert_eq!(page_parts(&page), explained);
}
