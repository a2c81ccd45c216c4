//! An error text without what terminals and logs put around it and into it.

/// Text between a log's prefix and the message. A prefix that lines share ends before it.
const BEGINNINGS: [&str; 4] = ["OutOfMemoryError", "RuntimeError", "out of memory", "Tried to"];

/// The text of bytes: UTF-8, or UTF-16 with a byte-order mark, as PowerShell redirects it.
pub(super) fn decoded(bytes: &[u8]) -> String {
    let wide = |unit: fn([u8; 2]) -> u16| {
        let units = bytes.as_chunks().0.iter().skip(1).map(|pair| unit(*pair));
        char::decode_utf16(units).map(|one| one.unwrap_or(char::REPLACEMENT_CHARACTER)).collect()
    };
    match bytes {
        [0xff, 0xfe, ..] => wide(u16::from_le_bytes),
        [0xfe, 0xff, ..] => wide(u16::from_be_bytes),
        _ => String::from_utf8_lossy(bytes).into_owned(),
    }
}

/// Without colours and the breaks that a terminal put into a line.
pub(super) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        match character {
            '\u{1b}' => {
                if characters.next_if_eq(&'[').is_some() {
                    while characters.next().is_some_and(|character| !character.is_ascii_alphabetic()) {}
                }
            }
            '\r' | '\u{a0}' | '\t' => out.push(' '),
            character => out.push(character),
        }
    }
    out
}

/// Lines without the prefix that neighbours share, as of a rank, a container or a logger, and without borders.
pub(super) fn unframed(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::with_capacity(text.len());
    for (at, line) in lines.iter().enumerate() {
        let beside = [at.checked_sub(1), Some(at + 1)].into_iter().flatten().filter_map(|at| lines.get(at));
        let prefix = beside.map(|other| prefix(line, other)).max().unwrap_or(0);
        out.push_str(line[prefix..].trim_end_matches([' ', '|', '│']));
        out.push('\n');
    }
    out
}

/// Length of the prefix that a line shares with another, up to the sign that ends a prefix.
fn prefix(line: &str, other: &str) -> usize {
    let most = BEGINNINGS.iter().filter_map(|word| line.find(word)).min().unwrap_or(line.len());
    let same = line.char_indices().zip(other.chars()).take_while(|((_, a), b)| a == b);
    let shared = same.map(|((at, a), _)| at + a.len_utf8()).last().unwrap_or(0).min(most);
    let shared = &line[..shared];
    // `stderr F` is of Kubernetes, `[rank2]:` of PyTorch's launcher, `name |` of Docker Compose.
    let ends = ["| ", "│ ", "> ", "]: ", ") ", " F "];
    ends.iter().filter_map(|end| Some(shared.rfind(end)? + end.len())).max().unwrap_or(0)
}

/// This many bytes of a text, or a few less where a character would be cut.
pub(super) fn window(text: &str, at: usize, bytes: usize) -> &str {
    let mut end = (at + bytes).min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[at..end]
}

/// Lines as one, because terminals and logs break them.
pub(super) fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
