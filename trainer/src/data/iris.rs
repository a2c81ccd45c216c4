//! Fisher's irises (1936): 150 flowers, four lengths in centimetres, three species.
//!
//! The table is the corrected one, as R and scikit-learn have it. The UCI repository's copy differs from Fisher's
//! article in rows 35 and 38.

use ring::digest::{SHA256, digest};

use super::{DataError, Dataset, DatasetName, Features, FileChecksum, Split, checksum_of, hex, seeded, shuffle};

const TABLE: &str = include_str!("iris.csv");
const FILE: &str = "iris.csv";
const SPECIES: [&str; 3] = ["setosa", "versicolor", "virginica"];
const FEATURES: usize = 4;
/// Number of the 50 flowers of a species that are reserved for validation.
const HELD_BACK: usize = 10;

/// A flower's lengths, and its place in [`SPECIES`].
type Row = ([f64; FEATURES], u8);

/// Splits the irises 120 to 30, each species in its share, and standardises them with the mean and deviation of the
/// 120.
pub(super) fn load(seed: u64) -> Result<Dataset, DataError> {
    let rows = parse(TABLE)?;
    let mut rng = seeded(seed, b"iris    ");
    let (mut train, mut validation) = (Vec::new(), Vec::new());
    for species in 0..SPECIES.len() {
        let mut of_species: Vec<Row> = rows.iter().copied().filter(|row| usize::from(row.1) == species).collect();
        shuffle(&mut of_species, &mut rng);
        validation.extend(of_species.drain(..HELD_BACK.min(of_species.len())));
        train.append(&mut of_species);
    }
    shuffle(&mut train, &mut rng);
    shuffle(&mut validation, &mut rng);

    // The validation rows must not leak into the scaling.
    let count = train.len() as f64;
    let mean: [f64; FEATURES] = std::array::from_fn(|f| train.iter().map(|row| row.0[f]).sum::<f64>() / count);
    let deviation: [f64; FEATURES] = std::array::from_fn(|f| {
        (train.iter().map(|row| (row.0[f] - mean[f]) * (row.0[f] - mean[f])).sum::<f64>() / count).sqrt()
    });
    let split = |rows: &[Row]| Split {
        rows: rows.len(),
        features: Features::F32(
            rows.iter().flat_map(|row| (0..FEATURES).map(|f| ((row.0[f] - mean[f]) / deviation[f]) as f32)).collect(),
        ),
        labels: rows.iter().map(|row| row.1).collect(),
    };
    let (train, validation) = (split(&train), split(&validation));
    Ok(Dataset {
        name: DatasetName::Iris,
        source: "embedded (Fisher 1936, corrected variant)".to_owned(),
        notice: None,
        files: vec![FileChecksum { path: FILE.to_owned(), sha256: hex(digest(&SHA256, TABLE.as_bytes()).as_ref()) }],
        checksum: checksum_of([&train, &validation]),
        features: FEATURES,
        classes: SPECIES.len(),
        train,
        validation,
    })
}

/// Reads the table: a line of column names, then a flower a line.
fn parse(table: &str) -> Result<Vec<Row>, DataError> {
    let flower = |(index, line): (usize, &str)| {
        let fault = |problem| DataError::Table { file: FILE, line: index + 1, problem };
        let mut cells = line.split(',');
        let mut lengths = [0.0; FEATURES];
        for length in &mut lengths {
            let value: f64 = cells
                .next()
                .and_then(|cell| cell.trim().parse().ok())
                .ok_or_else(|| fault("four lengths were expected"))?;
            if !(value.is_finite() && value > 0.0) {
                return Err(fault("a length must be above 0"));
            }
            *length = value;
        }
        let species = cells.next().and_then(|cell| SPECIES.iter().position(|species| *species == cell.trim()));
        match (species, cells.next()) {
            (Some(species), None) => Ok((lengths, species as u8)),
            _ => Err(fault("one of the three species was expected after the lengths")),
        }
    };
    table.lines().enumerate().skip(1).filter(|(_, line)| !line.trim().is_empty()).map(flower).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_corrected_one() {
        let rows = parse(TABLE).unwrap();
        assert_eq!(rows.len(), 150);
        for species in 0..3 {
            assert_eq!(rows.iter().filter(|row| row.1 == species).count(), 50);
        }
        assert_eq!(rows[34].0, [4.9, 3.1, 1.5, 0.2]);
        assert_eq!(rows[37].0, [4.9, 3.6, 1.4, 0.1]);
    }

    #[test]
    fn a_bad_line_is_named() {
        for bad in [
            "1,2,3\n",
            "1,2,3,x,setosa\n",
            "1,2,3,4,rose\n",
            "1,2,3,4,setosa,5\n",
            "1,2,3,-4,setosa\n",
            "1,2,3,inf,setosa\n",
        ] {
            let error = parse(&format!("header\n1,2,3,4,setosa\n{bad}")).unwrap_err().to_string();
            assert!(error.starts_with("iris.csv: line 3: "), "{error}");
        }
    }
}
