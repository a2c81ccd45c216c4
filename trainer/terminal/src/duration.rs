//! Times as people read them.

/// Nanoseconds in the unit that needs three digits.
#[must_use]
pub fn duration(ns: u64) -> String {
    // CAST: a display value of three digits.
    let value = ns as f64;
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{} us", digits(value / 1e3)),
        1_000_000..1_000_000_000 => format!("{} ms", digits(value / 1e6)),
        _ => format!("{} s", digits(value / 1e9)),
    }
}

fn digits(value: f64) -> String {
    if value < 10.0 {
        format!("{value:.2}")
    } else if value < 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_have_three_digits() {
        for (ns, text) in
            [(0, "0 ns"), (999, "999 ns"), (1_500, "1.50 us"), (25_400, "25.4 us"), (2_243_000, "2.24 ms")]
        {
            assert_eq!(duration(ns), text);
        }
        assert_eq!(duration(61_000_000_000), "61.0 s");
    }
}
