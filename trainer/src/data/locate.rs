//! Locations of MNIST's four files: the named directory, the environment, the default directories.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use etcetera::BaseStrategy;
use serde::Serialize;

use super::DataRequest;
use super::error::{shown, url_without_password};

/// One of the four files, as the world knows it.
#[derive(Debug, Clone)]
pub struct StandardFile {
    /// Its name, without `.gz`.
    pub name: &'static str,
    /// Its length, uncompressed.
    pub bytes: u64,
    /// SHA-256 of the uncompressed file, in lowercase hex.
    pub sha256: String,
    /// SHA-256 of the `.gz` file that the mirrors have; none if they may have compressed it afresh.
    pub gz_sha256: Option<String>,
}

/// Search locations and expected contents of MNIST: everything read from the environment, read once.
#[derive(Debug, Clone)]
pub struct Sources {
    /// The directory that `MNIST_DIR` names.
    pub env_dir: Option<PathBuf>,
    /// Download directory; none if the user has no home.
    pub cache_dir: Option<PathBuf>,
    /// Base URLs to download from, tried in order.
    pub mirrors: Vec<String>,
    /// The four files: train images, train labels, test images, test labels.
    pub files: [StandardFile; 4],
    /// Total time in which `auto` searches all mirrors for one that answers; `mnist` by name waits four times as long.
    pub connect_within: Duration,
    /// A download that receives nothing for this long has failed.
    pub stalled_after: Duration,
    /// A file may take as long as it would at this rate, and four times `stalled_after` beyond, for each of four attempts;
    /// then another mirror is asked.
    pub least_bytes_per_s: u64,
}

impl Sources {
    /// The standard places, as the environment has them (see the [module](super)).
    pub fn from_environment() -> Self {
        let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let own_mirrors = set("MNIST_MIRROR").map(|list| {
            let list = list.to_string_lossy();
            list.split(',').map(|url| url.trim().to_owned()).filter(|url| !url.is_empty()).collect::<Vec<_>>()
        });
        let cache = set("VRAMLAB_CACHE").map(PathBuf::from);
        let cache =
            cache.or_else(|| etcetera::choose_base_strategy().ok().map(|dirs| dirs.cache_dir().join("vramlab")));
        let mut files = STANDARD.map(|(name, bytes, sha256, gz_sha256)| StandardFile {
            name,
            bytes,
            sha256: sha256.to_owned(),
            gz_sha256: Some(gz_sha256.to_owned()),
        });
        if own_mirrors.is_some() {
            files.iter_mut().for_each(|file| file.gz_sha256 = None);
        }
        Self {
            env_dir: set("MNIST_DIR").map(PathBuf::from),
            cache_dir: cache.map(|dir| dir.join("mnist")),
            mirrors: own_mirrors.unwrap_or_else(|| MIRRORS.map(str::to_owned).to_vec()),
            files,
            connect_within: Duration::from_millis(2500),
            stalled_after: Duration::from_secs(30),
            // Five minutes for the largest, compressed as the mirrors have it.
            least_bytes_per_s: 32 << 10,
        }
    }

    /// Returns true if the user named MNIST's location, so that nothing may replace it.
    pub(super) fn user_points_at_mnist(&self, request: &DataRequest) -> bool {
        request.data_dir.is_some() || self.env_dir.is_some()
    }
}

const MIRRORS: [&str; 2] =
    ["https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"];

/// Name, uncompressed length, SHA-256 uncompressed, SHA-256 of the `.gz`.
const STANDARD: [(&str, u64, &str, &str); 4] = [
    (
        "train-images-idx3-ubyte",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    (
        "train-labels-idx1-ubyte",
        60_008,
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    (
        "t10k-images-idx3-ubyte",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    (
        "t10k-labels-idx1-ubyte",
        10_008,
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
];

/// Who named a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// `--data-dir`.
    DataDir,
    /// `MNIST_DIR`.
    Environment,
    /// The user's cache.
    Cache,
}

impl Origin {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::DataDir => "--data-dir",
            Self::Environment => "MNIST_DIR",
            Self::Cache => "the cache",
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A directory that was searched for MNIST.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// Who named the directory.
    pub origin: Origin,
    /// The directory.
    pub directory: PathBuf,
    /// The files that are there, in the order train images, train labels, test images, test labels.
    pub files: [Option<PathBuf>; 4],
    /// The standard names of those that are not.
    pub missing: Vec<&'static str>,
}

/// Availability of a download of MNIST.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Download {
    /// The program was built without the feature `download`.
    NotBuilt,
    /// The request forbids it.
    Offline,
    /// A directory was named, so only that counts.
    NotWanted,
    /// The user has no cache directory to download to.
    NoCache,
    /// From these base URLs; whether they answer was not tried.
    Possible(Vec<String>),
}

/// Searched locations of MNIST and the files found. Contents have not been read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MnistLocation {
    /// The one directory that counts: the one that the user named, else the cache; none if the user
    /// has no cache.
    pub candidate: Option<Candidate>,
    /// Availability of a download if files are missing.
    pub download: Download,
}

impl MnistLocation {
    /// The directory, if it has all four files.
    pub fn complete(&self) -> Option<&Candidate> {
        self.candidate.as_ref().filter(|candidate| candidate.missing.is_empty())
    }

    /// Description of the files found, for a message.
    pub(super) fn searched(&self) -> String {
        let Some(Candidate { origin, directory, missing, .. }) = &self.candidate else {
            return "there is no cache directory".to_owned();
        };
        let directory = shown(directory);
        match missing.len() {
            4 => format!("{directory} ({origin}) has none of its files"),
            _ => format!("{directory} ({origin}) lacks {}", missing.join(", ")),
        }
    }
}

impl fmt::Display for MnistLocation {
    /// One line for a person.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(candidate) = self.complete() {
            return write!(f, "{} ({})", shown(&candidate.directory), candidate.origin);
        }
        write!(f, "not here: {}; ", self.searched())?;
        match &self.download {
            Download::NotBuilt => f.write_str("this build cannot download it"),
            Download::Offline => f.write_str("the network is off limits"),
            Download::NotWanted => f.write_str("no other place counts"),
            Download::NoCache => f.write_str("there is no cache directory to download it to"),
            Download::Possible(mirrors) => {
                write!(f, "would be downloaded from {}", mirrors.join(" or "))
            }
        }
    }
}

/// Finds MNIST without reading it.
pub fn locate_mnist(request: &DataRequest) -> MnistLocation {
    locate_mnist_with(request, &Sources::from_environment())
}

/// [`locate_mnist`] with the places to look in given, not taken from the environment.
pub fn locate_mnist_with(request: &DataRequest, sources: &Sources) -> MnistLocation {
    let places = [
        (Origin::DataDir, &request.data_dir),
        (Origin::Environment, &sources.env_dir),
        (Origin::Cache, &sources.cache_dir),
    ];
    let named =
        |&(origin, directory): &(Origin, &Option<PathBuf>)| directory.clone().map(|directory| (origin, directory));
    let candidate = places.iter().find_map(named).map(|(origin, directory)| {
        let files = find(&directory);
        let missing =
            STANDARD.iter().zip(&files).filter(|(_, file)| file.is_none()).map(|(standard, _)| standard.0).collect();
        Candidate { origin, directory, files, missing }
    });
    let download = if candidate.as_ref().is_some_and(|candidate| candidate.origin != Origin::Cache) {
        Download::NotWanted
    } else if cfg!(not(feature = "download")) {
        Download::NotBuilt
    } else if request.offline {
        Download::Offline
    } else if candidate.is_none() {
        Download::NoCache
    } else {
        Download::Possible(sources.mirrors.iter().map(|url| url_without_password(url)).collect())
    };
    MnistLocation { candidate, download }
}

/// Finds the four files in `directory` or in torchvision's subdirectory, whichever has more of them.
fn find(directory: &Path) -> [Option<PathBuf>; 4] {
    let layout = |directory: &Path| {
        STANDARD
            .map(|standard| spellings(standard.0).iter().map(|name| directory.join(name)).find(|path| path.is_file()))
    };
    let layouts = [layout(directory), layout(&directory.join("MNIST").join("raw"))];
    let [flat, nested] = layouts;
    let count = |files: &[Option<PathBuf>; 4]| files.iter().flatten().count();
    if count(&nested) > count(&flat) { nested } else { flat }
}

/// The names under which a file occurs: some archives put a dot where others put a dash. Unpacked files come first,
/// being faster to read.
fn spellings(name: &str) -> [String; 4] {
    let dotted = name.replacen("-idx", ".idx", 1);
    [name.to_owned(), dotted.clone(), format!("{name}.gz"), format!("{dotted}.gz")]
}
