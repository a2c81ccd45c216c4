//! Whether stack frames show that the program cannot have expandable segments: it ran on Windows, or shares memory between
//! processes by CUDA IPC.

use std::fmt;
use vramlab::histories::formats::{Frame, Origins};

/// Parts of the names of functions that share memory or open what is shared: of PyTorch in Python and in C++, of the CUDA
/// runtime, and of kernels that reduce in each other's memory.
const FUNCTIONS: [&str; 9] = [
    "_share_cuda_",
    "rebuild_cuda_tensor",
    "_new_shared_cuda",
    "THPStorage_shareCuda",
    "CudaIPC",
    "IpcMemHandle",
    "shareIpcHandle",
    "getIpcDevPtr",
    "graph_buffer_ipc_meta",
];

/// Files that do so, with the function where not all of the file does.
const FILES: [(&str, &str); 2] = [("multiprocessing/reductions.py", "reduce_tensor"), ("custom_all_reduce.", "")];

/// What stands against expandable segments, with the frame (`file:line function`) that shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    Windows(String),
    Ipc(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Windows(frame) => write!(f, "The program ran on Windows ({frame})"),
            Self::Ipc(frame) => write!(f, "The program shares GPU memory by CUDA IPC ({frame})"),
        }
    }
}

/// What frames show: the first of them that shows anything.
pub(super) fn shown(origins: &Origins) -> Option<Obstacle> {
    origins.all_frames().find_map(|Frame { name, filename, line }| {
        let (name, path) = (origins.spelt(name), origins.spelt(filename));
        let file = path.replace('\\', "/");
        let parts: Vec<&str> = file.rsplitn(3, '/').take(2).collect();
        let frame = || format!("{}:{line} {name}", parts.iter().rev().copied().collect::<Vec<_>>().join("/"));
        if is_of_windows(path) {
            return Some(Obstacle::Windows(frame()));
        }
        let shares = FUNCTIONS.iter().any(|part| name.contains(part))
            || FILES.iter().any(|(end, function)| file.contains(end) && name.contains(function));
        shares.then(|| Obstacle::Ipc(frame()))
    })
}

/// Whether a path begins with a drive, as `C:\\`.
fn is_of_windows(path: &str) -> bool {
    matches!(path.as_bytes(), [drive, b':', b'\\' | b'/', ..] if drive.is_ascii_alphabetic())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vramlab::budget::Budget;

    fn of(frames: &[(&str, &str)]) -> Option<Obstacle> {
        let mut origins = Origins::new(&Budget::default());
        for (name, file) in frames {
            let frame = Frame { name: origins.text(name).unwrap(), filename: origins.text(file).unwrap(), line: 7 };
            origins.frame(frame).unwrap();
        }
        shown(&origins)
    }

    #[test]
    fn frames_that_stand_against_expandable_segments_are_found() {
        let step = ("step", "/home/me/train.py");
        assert_eq!(of(&[step, ("at::empty", "??"), ("call", "<string>")]), None);
        // A function of this name is in many training scripts, where it sums over ranks.
        assert_eq!(of(&[("reduce_tensor", "/home/me/train.py")]), None);
        let torch = ("reduce_tensor", "/env/torch/multiprocessing/reductions.py");
        let frame = "multiprocessing/reductions.py:7 reduce_tensor".to_owned();
        assert_eq!(of(&[step, torch]), Some(Obstacle::Ipc(frame)));
        for name in [
            "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::shareIpcHandle(void*)",
            "torch::CudaIPCSentDataDelete(void*)",
        ] {
            assert!(of(&[step, (name, "??")]).unwrap().to_string().contains(name), "{name}");
        }
        let reduces = ("__init__", "vllm/distributed/device_communicators/custom_all_reduce.py");
        assert!(matches!(of(&[reduces]), Some(Obstacle::Ipc(_))));
        let windows = of(&[("forward", "C:\\Users\\me\\net.py")]);
        assert_eq!(windows, Some(Obstacle::Windows("me/net.py:7 forward".to_owned())));
    }
}
