//! How far repeats lie apart, and which of them stand out.

use super::figures::median;

/// Above this spread the repeats of a cell are called noisy.
pub(crate) const NOISY: f64 = 0.05;
/// A repeat stands out when it is this many times the spread away, and by this share of the median.
const OUTLIER_SPREADS: f64 = 5.0;
const OUTLIER_SHARE: f64 = 0.1;

/// Standard deviation over the median, estimated by the median of the distances from the median, which one outlier
/// does not move. `None` for fewer than two values.
pub(crate) fn spread(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let middle = median(values);
    let distances: Vec<f64> = values.iter().map(|value| (value - middle).abs()).collect();
    // Of two or three values the median distance says little; half of the range does.
    let deviation = if values.len() < 4 {
        let range = values.iter().copied().fold(f64::MIN, f64::max) - values.iter().copied().fold(f64::MAX, f64::min);
        range / 2.0
    } else {
        // What makes it the standard deviation of a normal distribution.
        1.4826 * median(&distances)
    };
    (middle != 0.0).then(|| deviation / middle.abs())
}

/// Places of the values that stand out. Of fewer than four, none does.
pub(crate) fn outliers(values: &[f64]) -> Vec<usize> {
    if values.len() < 4 {
        return Vec::new();
    }
    let (middle, spread) = (median(values), spread(values).unwrap_or(0.0));
    let far = |value: f64| {
        let distance = ((value - middle) / middle).abs();
        distance > OUTLIER_SPREADS * spread && distance > OUTLIER_SHARE
    };
    (0..values.len()).filter(|at| far(values[*at])).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test reports a failure by panicking")]

    use super::*;

    #[test]
    fn one_value_out_of_line_is_found_and_does_not_widen_the_spread() {
        let values = [1.0, 1.01, 0.99, 1.02, 0.98, 3.0];
        assert!(spread(&values).unwrap() < 0.05, "{:?}", spread(&values));
        assert_eq!(outliers(&values), [5]);
        assert_eq!(outliers(&[1.0, 1.01, 0.99, 1.02, 0.98, 1.05]), [0; 0]);
    }

    #[test]
    fn few_values() {
        assert_eq!(spread(&[1.0]), None);
        assert_eq!(outliers(&[1.0, 9.0, 1.0]), [0; 0]);
        assert!((spread(&[1.0, 1.2]).unwrap() - 0.1 / 1.2).abs() < 1e-12);
        assert_eq!(spread(&[2.0, 2.0, 2.0]), Some(0.0));
        assert_eq!(outliers(&[2.0; 9]), [0; 0]);
    }
}
