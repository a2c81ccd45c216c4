//! Command lines without their secrets: records are kept and sent to others.

/// Stands for what is left out.
const MASK: &str = "***";
/// Ends of names whose value nobody else is to see. Each is a word of the name: `--tokenizer` and `--max-tokens` are not meant.
const LAST: [&str; 12] =
    ["token", "key", "secret", "pass", "pwd", "pw", "auth", "authorization", "bearer", "cookie", "jwt", "signature"];
/// Parts of such names, wherever they are.
const INSIDE: [&str; 5] = ["password", "passwd", "passphrase", "secret", "credential"];
/// Ends of names in one piece.
const GLUED: [&str; 4] = ["apikey", "accesskey", "authtoken", "accesstoken"];
/// How tokens begin that say whose they are.
const KINDS: [&str; 13] =
    ["hf_", "sk-", "ghp_", "gho_", "ghs_", "github_pat_", "glpat-", "xoxb-", "xoxp-", "AKIA", "AIza", "eyJ", "pypi-"];
/// Such tokens are longer than words that begin alike.
const SHORTEST: usize = 20;

/// The words of a command line, with what looks like a secret left out: values of options and variables that are called
/// so, passwords in addresses, and tokens of a known form. A word may be a script, as behind `sh -c`.
pub(super) fn redact<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let mut value = false;
    let mut hide = |word: &str| {
        // An option that has no value is followed by another one.
        if std::mem::take(&mut value) && !word.starts_with("--") {
            return MASK.to_owned();
        }
        let mut scan = Scan { rest: word, out: String::with_capacity(word.len()), value: false };
        scan.word();
        value = scan.value;
        scan.out
    };
    words.into_iter().map(&mut hide).collect()
}

/// A word on its way.
struct Scan<'a> {
    rest: &'a str,
    out: String,
    /// Whether the word ends with an option whose value is the next word.
    value: bool,
}

impl<'a> Scan<'a> {
    fn word(&mut self) {
        // Everything behind `--password=` is its value.
        let name = self.rest.find(|character| !in_name(character)).unwrap_or(self.rest.len());
        if self.rest.starts_with('-') && self.rest[name..].starts_with('=') && is_secret(&self.rest[..name]) {
            self.keep(name + 1);
            self.hide(self.rest.len());
            return;
        }
        while !self.rest.is_empty() {
            self.name();
            if let Some(rest) = self.rest.strip_prefix("://") {
                self.keep(3);
                let end = rest.find(|c: char| c.is_whitespace() || "/?#\"'`".contains(c)).unwrap_or(rest.len());
                self.hide(rest[..end].rfind('@').unwrap_or(0));
            } else if let Some(character) = self.rest.chars().next().filter(|character| !in_name(*character)) {
                self.keep(character.len_utf8());
            }
        }
    }

    /// A name with its value, or what is none.
    fn name(&mut self) {
        let length = self.rest.find(|character| !in_name(character)).unwrap_or(self.rest.len());
        let (name, after) = self.rest.split_at(length);
        if name.len() >= SHORTEST && KINDS.iter().any(|kind| name.starts_with(kind)) {
            return self.hide(length);
        }
        self.keep(length);
        if !is_secret(name) {
            return;
        }
        // A key of JSON is quoted.
        let quote = after.trim_start_matches('\\').strip_prefix(['"', '\'']).map_or(0, |rest| after.len() - rest.len());
        let assigned = after[quote..].trim_start_matches(' ');
        if assigned.starts_with([':', '=']) && !assigned.starts_with("://") {
            let to_value = after.len() - assigned.len() + 1;
            self.keep(to_value);
            self.keep(self.rest.len() - self.rest.trim_start_matches(' ').len());
            self.secret();
        } else if name.starts_with('-') || name.eq_ignore_ascii_case("bearer") {
            let gap = after.len() - after.trim_start().len();
            self.keep(gap);
            match self.rest {
                "" => self.value = gap == 0 && after.is_empty(),
                rest if gap > 0 && !rest.starts_with("--") => self.secret(),
                _ => {}
            }
        }
    }

    /// A value: in quotes to the next of them, else to where a shell, an address or JSON ends it.
    fn secret(&mut self) {
        let slashes = self.rest.len() - self.rest.trim_start_matches('\\').len();
        let quote = self.rest[slashes..].chars().next().filter(|character| "\"'".contains(*character));
        match quote {
            Some(quote) => {
                self.keep(slashes + 1);
                self.hide(self.rest.find(quote).unwrap_or(self.rest.len()));
            }
            None => {
                let ends = |c: char| c.is_whitespace() || "&;,|)}\"'`".contains(c);
                let end = self.rest.find(ends).unwrap_or(self.rest.len());
                // `Authorization: Bearer …` says first which kind it is.
                let kind = ["bearer", "basic", "token"].iter().any(|kind| self.rest[..end].eq_ignore_ascii_case(kind));
                if kind && self.rest[end..].starts_with(' ') {
                    self.keep(end + 1);
                    return self.secret();
                }
                self.hide(end);
            }
        }
    }

    fn keep(&mut self, bytes: usize) {
        let (kept, rest) = self.rest.split_at(bytes);
        self.out += kept;
        self.rest = rest;
    }

    fn hide(&mut self, bytes: usize) {
        if bytes > 0 {
            self.out += MASK;
        }
        self.rest = &self.rest[bytes..];
    }
}

fn in_name(character: char) -> bool {
    character.is_alphanumeric() || "_-.".contains(character)
}

/// Whether a name is that of a secret: `--hub-token`, `HF_TOKEN`, `wandb.apiKey`.
fn is_secret(name: &str) -> bool {
    let mut words = String::with_capacity(name.len() + 4);
    let mut small = false;
    for character in name.trim_start_matches('-').chars() {
        if small && character.is_uppercase() {
            words.push('_');
        }
        small = character.is_lowercase();
        words.extend(character.to_lowercase());
    }
    let last = words.rsplit(['_', '-', '.']).next().unwrap_or_default();
    LAST.contains(&last)
        || INSIDE.iter().any(|part| words.contains(part))
        || GLUED.iter().any(|end| words.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(words: &[&str]) -> String {
        redact(words.iter().copied()).join(" ")
    }

    #[test]
    fn values_under_secret_names_are_left_out() {
        for (words, expected) in [
            (&["train.py", "--api-key", "x1", "--lr", "3"][..], "train.py --api-key *** --lr 3"),
            (&["--token=a b,c&d", "x"], "--token=*** x"),
            (&["env", "HF_TOKEN=abc", "python"], "env HF_TOKEN=*** python"),
            (&["--wandb.apiKey=abc", "--wandb.project=p"], "--wandb.apiKey=*** --wandb.project=p"),
            (&["+trainer.password=a", "-pw", "b"], "+trainer.password=*** -pw ***"),
            (&["--password", "--verbose"], "--password --verbose"),
            (&["--password", "-x-"], "--password ***"),
            (&["--secret"], "--secret"),
            (&["AWS_SECRET_ACCESS_KEY=", "OPENAI_APIKEY=b"], "AWS_SECRET_ACCESS_KEY= OPENAI_APIKEY=***"),
        ] {
            assert_eq!(shown(words), expected);
        }
    }

    #[test]
    fn a_script_in_one_word_is_read_like_words() {
        for (script, expected) in [
            ("TOKEN=x python a.py --api-key y --lr 1", "TOKEN=*** python a.py --api-key *** --lr 1"),
            ("export TOKEN=\"a b\"; run", "export TOKEN=\"***\"; run"),
            ("curl -H 'Authorization: Bearer abc' u", "curl -H 'Authorization: Bearer ***' u"),
            ("X-Api-Key: abc", "X-Api-Key: ***"),
            (r#"{"password": "a\u00e4", "n": 1}"#, r#"{"password": "***", "n": 1}"#),
            (r#"{\"token\": \"abc\"}"#, r#"{\"token\": \"***"}"#),
            ("run --password  ", "run --password  "),
        ] {
            assert_eq!(shown(&[script]), expected);
        }
    }

    #[test]
    fn addresses_and_tokens_of_a_known_form_are_left_out() {
        let token = format!("hf_{}", "a".repeat(34));
        for (word, expected) in [
            ("https://user:pass@host/path", "https://***@host/path"),
            ("redis://:p@ss@host:1/0", "redis://***@host:1/0"),
            ("https://host/a?token=b&n=1", "https://host/a?token=***&n=1"),
            ("https://host/@user", "https://host/@user"),
            (token.as_str(), "***"),
        ] {
            assert_eq!(shown(&[word]), expected);
        }
    }

    #[test]
    fn all_else_stays() {
        let words = [
            "python",
            "-m",
            "train",
            "--tokenizer",
            "gpt2",
            "--max-tokens=512",
            "--tokens",
            "7",
            "key",
            "größe=ä",
            "",
            "a=b:c",
            "tcp://10.0.0.1:29500",
            "sk-learn",
            "monkey=1",
            "--batch-size",
            "8",
            "C:\\x",
            "{\"a\": [1, 2]}",
            "--author",
            "me",
        ];
        assert_eq!(redact(words), words);
    }
}
