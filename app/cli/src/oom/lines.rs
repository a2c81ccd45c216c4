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

/// Without colours, escapes of JSON, and the breaks that a terminal put into a line.
pub(super) fn plain(text: &str) -> String {
    let text = &unescaped(text);
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

/// With the characters that JSON, Python's `repr` and shells write as escapes. A path of Windows may break, from which nothing is read.
fn unescaped(text: &str) -> String {
    const ESCAPES: [(&str, &str); 9] = [
        ("n", "\n"),
        ("r", " "),
        ("t", " "),
        ("\"", "\""),
        ("u001b[", "\u{1b}["),
        ("u001B[", "\u{1b}["),
        ("x1b[", "\u{1b}["),
        ("033[", "\u{1b}["),
        ("u00a0", " "),
    ];
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        // A string in a string has its escapes escaped.
        let behind = rest[at..].trim_start_matches('\\');
        match ESCAPES.iter().find_map(|(name, text)| Some((behind.strip_prefix(name)?, text))) {
            Some((next, text)) => {
                out.push_str(text);
                rest = next;
            }
            None => {
                out.push_str(&rest[at..rest.len() - behind.len()]);
                rest = behind;
            }
        }
    }
    out + rest
}

/// Without the lines of other processes than the one that wrote the last message: ranks write at the same time.
pub(super) fn of_one_process(text: &str, message: &str) -> String {
    let Some(line) = text.lines().rfind(|line| line.contains(message)) else { return text.to_owned() };
    let Some(process) = process(line) else { return text.to_owned() };
    let is_of_it = |line: &&str| self::process(line).is_none_or(|other| other == process);
    text.lines().filter(is_of_it).collect::<Vec<_>>().join("\n")
}

/// Which process wrote a line: `[rank2]:`, `[1,3]<stderr>:`, `(worker pid=17)`, `name-0 |`.
fn process(line: &str) -> Option<&str> {
    let line = line[stamp(line)..].trim_start();
    let tag = match line.chars().next()? {
        '[' => &line[..=line.find(']')?],
        '(' => &line[..=line.find(')')?],
        _ => &line[..line.find(" |")?],
    };
    let is_name = tag.len() < 60 && tag.contains(|character: char| character.is_ascii_digit()) && !tag.contains(':');
    let is_word = !tag.trim_end().contains(' ') || tag.contains("pid=");
    (is_name && is_word).then_some(tag)
}

/// Length of a time at the beginning of a line, `2026-01-02T03:04:05.678Z ` or `[2026-01-02 03:04:05,678] `.
fn stamp(line: &str) -> usize {
    let is_time = |text: &str| {
        let digits = text.bytes().filter(u8::is_ascii_digit).count();
        digits >= 14
            && text.matches(':').count() >= 2
            && text.bytes().all(|byte| byte.is_ascii_digit() || b"[]-T:.,Z+/ ".contains(&byte))
    };
    // The date and the time may have a space between them.
    let ends = line.match_indices(' ').take(2).map(|(at, _)| at + 1);
    ends.filter(|end| is_time(&line[..*end])).max().unwrap_or(0)
}

/// Lines without the prefix that neighbours share, as of a rank, a container or a logger, and without borders.
pub(super) fn unframed(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let mut out = String::with_capacity(text.len());
    for (at, line) in lines.iter().enumerate() {
        let beside = [at.checked_sub(1), Some(at + 1)].into_iter().flatten().filter_map(|at| lines.get(at));
        let prefix = beside.map(|other| prefix(line, other)).max().unwrap_or(0);
        let line = &line[prefix..];
        out.push_str(line[stamp(line)..].trim_end_matches([' ', '|', '│']));
        out.push('\n');
    }
    out
}

/// Length of the prefix that a line shares with another, up to the sign that ends a prefix.
fn prefix(line: &str, other: &str) -> usize {
    let most = BEGINNINGS.iter().filter_map(|word| line.find(word)).min().unwrap_or(line.len());
    // Times and line numbers differ from line to line.
    let alike = |a: char, b: char| a == b || a.is_ascii_digit() && b.is_ascii_digit();
    let same = line.char_indices().zip(other.chars()).take_while(|((_, a), b)| alike(*a, *b));
    let shared = same.map(|((at, a), _)| at + a.len_utf8()).last().unwrap_or(0).min(most);
    let shared = &line[..shared];
    // `stderr F` is of Kubernetes, `[rank2]:` of PyTorch's launcher, `name |` of Docker Compose.
    let ends = ["| ", "│ ", "> ", "]: ", "] ", ") ", " F "];
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
