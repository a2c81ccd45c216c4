//! MNIST: getting its four files, reading them, and seeing that they fit together.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::thread;

use ring::digest::{Context, Digest, SHA256};

use super::error::shown;
use super::idx::{Idx, IdxKind, IdxLimits, parse_idx};
use super::locate::{Candidate, Download, MnistLocation, Origin, Sources, locate_mnist_with};
use super::{
    DataError, DataRequest, Dataset, DatasetName, Features, FileChecksum, Hashed, Progress, Split, hex, unpacked,
};

/// Labels are digits.
const CLASSES: usize = 10;

/// Finds MNIST, downloading it if need be, reads it and checks it.
pub(super) fn load(request: &DataRequest, sources: &Sources, progress: &dyn Progress) -> Result<Dataset, DataError> {
    let mut location = locate_mnist_with(request, sources);
    if location.complete().is_none() {
        if let Some(candidate) = location.candidate.as_ref().filter(|candidate| candidate.origin != Origin::Cache) {
            let (directory, origin) = (shown(&candidate.directory), candidate.origin.name());
            return Err(if candidate.directory.is_dir() {
                let file = candidate.missing[0];
                DataError::Missing { file, directory, origin }
            } else {
                DataError::NoDirectory { directory, origin }
            });
        }
        fetch(request, sources, &location, progress)?;
        location = locate_mnist_with(request, sources);
    }
    match location.complete() {
        Some(Candidate { origin, directory, files: [Some(a), Some(b), Some(c), Some(d)], .. }) => {
            read(*origin, directory, [a, b, c, d], sources)
        }
        _ => Err(unavailable(&location, "another process removed what was fetched", "run it again")),
    }
}

fn unavailable(location: &MnistLocation, reason: &'static str, mend: &'static str) -> DataError {
    DataError::Unavailable { searched: location.searched(), reason, mend }
}

/// Downloads the files missing from the cache.
#[cfg_attr(not(feature = "download"), expect(unused_variables))]
fn fetch(
    request: &DataRequest,
    sources: &Sources,
    location: &MnistLocation,
    progress: &dyn Progress,
) -> Result<(), DataError> {
    let (reason, mend) = match (&location.download, &location.candidate) {
        #[cfg(feature = "download")]
        (Download::Possible(_), Some(cache)) => {
            return super::download::fetch(request, cache, sources, progress);
        }
        (Download::Offline, _) => {
            ("the run is offline", "run it with the network, or give the four files with --data-dir")
        }
        (Download::NotBuilt, _) => {
            ("this program was built without the feature `download`", "give the four files with --data-dir")
        }
        _ => ("the user has no cache directory", "set VRAMLAB_CACHE, or give the four files with --data-dir"),
    };
    Err(unavailable(location, reason, mend))
}

/// Reads the four files and puts them together.
fn read(origin: Origin, directory: &Path, paths: [&PathBuf; 4], sources: &Sources) -> Result<Dataset, DataError> {
    let [train_images, train_labels, test_images, test_labels] = paths;
    // The training images are six sevenths of the work; the rest fits beside them.
    let (train, rest) = thread::scope(|scope| {
        let train = scope.spawn(|| read_file(train_images, IdxKind::Images));
        let rest = (|| {
            Ok((
                read_file(train_labels, IdxKind::Labels)?,
                read_file(test_images, IdxKind::Images)?,
                read_file(test_labels, IdxKind::Labels)?,
            ))
        })();
        (train.join(), rest)
    });
    let train = train.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let (train_label, test, test_label) = rest?;

    let contents = [&train, &train_label, &test, &test_label];
    let strange: Vec<usize> = (0..4).filter(|&file| contents[file].sha256 != sources.files[file].sha256).collect();
    if let (Origin::Cache, Some(&file)) = (origin, strange.first()) {
        let problem = format!(
            "the SHA-256 is {} where {} was expected: it is damaged, or not MNIST: delete it and run again",
            contents[file].sha256, sources.files[file].sha256
        );
        return Err(DataError::Unusable { file: shown(paths[file]), problem });
    }
    let notice = (!strange.is_empty()).then(|| {
        let names: Vec<&str> = strange.iter().map(|&file| sources.files[file].name).collect();
        format!("{} does not hold the standard MNIST: the SHA-256 differs for {}", shown(directory), names.join(", "))
    });

    check_counts(&train.idx, train_images, &train_label.idx, train_labels)?;
    check_counts(&test.idx, test_images, &test_label.idx, test_labels)?;
    if train.idx.shape[1..] != test.idx.shape[1..] {
        let of = |idx: &Idx, path| format!("{} has images of {}x{}", shown(path), idx.shape[1], idx.shape[2]);
        let (train, test) = (of(&train.idx, train_images), of(&test.idx, test_images));
        return Err(DataError::Mismatch(format!("{train} but {test}")));
    }
    check_labels(&train_label.idx, train_labels)?;
    check_labels(&test_label.idx, test_labels)?;

    let mut over_all = Context::new(&SHA256);
    contents.iter().for_each(|file| over_all.update(file.digest.as_ref()));
    let checksums = contents
        .iter()
        .zip(paths)
        .map(|(file, path)| FileChecksum { path: shown(path), sha256: file.sha256.clone() })
        .collect();
    let split = |images: Idx, labels: Idx| Split {
        rows: images.items(),
        features: Features::U8 { bytes: images.data, scale: 1.0 / 255.0, shift: 0.0 },
        labels: labels.data,
    };
    Ok(Dataset {
        name: DatasetName::Mnist,
        source: format!("{} ({origin})", shown(directory)),
        notice,
        files: checksums,
        checksum: hex(over_all.finish().as_ref()),
        features: train.idx.features(),
        classes: CLASSES,
        train: split(train.idx, train_label.idx),
        validation: split(test.idx, test_label.idx),
    })
}

fn check_counts(images: &Idx, images_path: &Path, labels: &Idx, labels_path: &Path) -> Result<(), DataError> {
    if images.items() == labels.items() {
        return Ok(());
    }
    let (of_images, of_labels) = (shown(images_path), shown(labels_path));
    let (images, labels) = (images.items(), labels.items());
    Err(DataError::Mismatch(format!("{of_images} has {images} images but {of_labels} has {labels} labels")))
}

fn check_labels(labels: &Idx, path: &Path) -> Result<(), DataError> {
    match labels.data.iter().position(|&label| usize::from(label) >= CLASSES) {
        // The header of a labels file has eight bytes.
        Some(at) => {
            let (offset, label) = (8 + at, labels.data[at]);
            let problem = format!(
                "offset {offset}: the label is {label}, but labels go from 0 to 9: the file is damaged or of another data set"
            );
            Err(DataError::Unusable { file: shown(path), problem })
        }
        None => Ok(()),
    }
}

/// A file's contents and their digest.
struct Contents {
    idx: Idx,
    digest: Digest,
    sha256: String,
}

fn read_file(path: &Path, kind: IdxKind) -> Result<Contents, DataError> {
    let cannot_read = |source| DataError::Read { file: shown(path), source };
    let file = File::open(path).map_err(cannot_read)?;
    let mut hashed = Hashed::new(unpacked(file).map_err(cannot_read)?);
    let idx = parse_idx(&mut hashed, &shown(path), &IdxLimits::new(kind))?;
    let digest = hashed.hash.finish();
    Ok(Contents { idx, digest, sha256: hex(digest.as_ref()) })
}
