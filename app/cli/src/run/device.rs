//! Samples of the driver's memory figures while a program runs: used in total, and by each process.

use super::calls::{CudaProcess, NcclUse};
use super::folder::{Folder, create_private, now_ns};
use super::host;
use super::processes::{Gpu, Process};
use crate::curves::{Curve, Curves, ENDING};
use anyhow::Result;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;
use vramlab::output::Existing;

/// Time between samples at first.
const EVERY: Duration = Duration::from_millis(100);
/// Samples that are kept of a GPU: with more, each two become one and the time between them doubles.
const MOST: usize = 4096;
/// Time for a driver to answer the last question; one that hangs keeps nobody.
const PATIENCE: Duration = Duration::from_secs(10);

/// Takes samples in a thread of its own.
pub(super) struct Sampler {
    stop: Sender<()>,
    result: Receiver<Sampled>,
}

/// The samples.
#[derive(Debug, Default)]
pub(crate) struct Sampled {
    /// Why nothing was.
    pub(crate) missing: Option<String>,
    every: Duration,
    gpus: Vec<SampledGpu>,
}

#[derive(Debug)]
struct SampledGpu {
    uuid: String,
    name: String,
    total_bytes: u64,
    /// Whether it has no memory of its own (GB10, Jetson): NVML does not report any, and the host's is sampled.
    shares_host: bool,
    samples: Vec<Sample>,
}

/// Memory of a GPU at a moment.
#[derive(Clone, Debug)]
struct Sample {
    time_ns: u64,
    used_bytes: u64,
    /// By process; a driver may not tell, and in a container its numbers are the host's.
    processes: BTreeMap<u32, u64>,
}

impl Sampler {
    /// Takes samples from now on; the first is of before the program starts.
    pub(super) fn start() -> Self {
        let (stop, stopped) = channel();
        let (sender, result) = channel();
        let thread = std::thread::Builder::new().name("device".to_owned()).spawn(move || {
            // Nobody waits for it any more where this fails.
            let _ = sender.send(sample(&stopped));
        });
        // Without the thread nothing is sent.
        drop(thread);
        Self { stop, result }
    }

    pub(super) fn stop(self) -> Sampled {
        // It may have ended already.
        let _ = self.stop.send(());
        let missing = |why: &str| Sampled { missing: Some(why.to_owned()), ..Sampled::default() };
        self.result.recv_timeout(PATIENCE).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => missing("the NVIDIA driver does not answer"),
            RecvTimeoutError::Disconnected => missing("the sampling failed"),
        })
    }
}

fn sample(stopped: &Receiver<()>) -> Sampled {
    let nvml = match Nvml::init() {
        Ok(nvml) => nvml,
        Err(error) => return Sampled { missing: Some(why(&error)), ..Sampled::default() },
    };
    let mut sampled = Sampled { missing: None, every: EVERY, gpus: gpus(&nvml) };
    loop {
        sampled.take(&nvml);
        match stopped.recv_timeout(sampled.every) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return sampled,
        }
    }
}

/// Why there is no NVML, in a few words.
fn why(error: &NvmlError) -> String {
    match error {
        NvmlError::LibloadingError(_) => "there is no NVIDIA driver (libnvidia-ml.so.1)".to_owned(),
        other => format!("NVML: {other}"),
    }
}

fn gpus(nvml: &Nvml) -> Vec<SampledGpu> {
    let of = |index| {
        let device = nvml.device_by_index(index).ok()?;
        let (total_bytes, shares_host) = match device.memory_info() {
            Ok(memory) => (memory.total, false),
            Err(NvmlError::NotSupported) => (host::total(&host::read)?, true),
            Err(_) => return None,
        };
        let (uuid, name) = (device.uuid().ok()?, device.name().unwrap_or_default());
        Some(SampledGpu { uuid, name, total_bytes, shares_host, samples: Vec::new() })
    };
    (0..nvml.device_count().unwrap_or(0)).filter_map(of).collect()
}

impl Sampled {
    fn take(&mut self, nvml: &Nvml) {
        for gpu in &mut self.gpus {
            let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else { continue };
            let used = match gpu.shares_host {
                true => host::used(&host::read),
                false => device.memory_info().ok().map(|memory| memory.used),
            };
            let Some(used_bytes) = used else { continue };
            let mut processes = BTreeMap::new();
            for process in device.running_compute_processes().unwrap_or_default() {
                if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
                    processes.insert(process.pid, bytes);
                }
            }
            gpu.samples.push(Sample { time_ns: now_ns(), used_bytes, processes });
        }
        if self.gpus.iter().any(|gpu| gpu.samples.len() >= MOST) {
            self.gpus.iter_mut().for_each(|gpu| gpu.samples = halved(&gpu.samples));
            self.every *= 2;
        }
    }

    /// Whether a GPU has no memory of its own.
    pub(super) fn shares_host(&self) -> bool {
        self.gpus.iter().any(|gpu| gpu.shares_host)
    }

    /// Most bytes used on one of the GPUs that processes used.
    pub(super) fn peak(&self, processes: &[Process]) -> Option<u64> {
        let curves = processes.iter().flat_map(|process| process.devices.iter().map(move |gpu| (process, gpu)));
        curves.filter_map(|(process, gpu)| self.curve(process, gpu, None)?.used_bytes.into_iter().max()).max()
    }

    /// What a process's GPUs held, beside its snapshots: `NAME.device.json`.
    pub(super) fn write(&self, folder: &Folder, processes: &[Process], calls: &[CudaProcess]) -> Result<()> {
        for process in processes {
            let nccl = calls.iter().find(|calls| calls.pid == process.pid).and_then(|calls| calls.nccl.as_ref());
            let gpus: Vec<Curve> = process.devices.iter().filter_map(|gpu| self.curve(process, gpu, nccl)).collect();
            if gpus.is_empty() {
                continue;
            }
            let curves = Curves { pid: process.pid, gpus };
            let path = folder.path.join(format!("{}{ENDING}", process.name));
            create_private(&path, Existing::Replace)?.fill(serde_json::to_string(&curves)? + "\n")?;
        }
        Ok(())
    }

    fn curve(&self, process: &Process, gpu: &Gpu, nccl: Option<&NcclUse>) -> Option<Curve> {
        let uuid = gpu.uuid.as_deref()?;
        let of = self
            .gpus
            .iter()
            .find(|sampled| sampled.uuid.trim_start_matches("GPU-") == uuid.trim_start_matches("GPU-"))?;
        let told = of.samples.iter().any(|sample| sample.processes.contains_key(&process.pid));
        let own = |sample: &Sample| sample.processes.get(&process.pid).copied().unwrap_or(0);
        Some(Curve {
            index: gpu.index,
            uuid: of.uuid.clone(),
            name: of.name.clone(),
            total_bytes: of.total_bytes,
            time_ns: of.samples.iter().map(|sample| sample.time_ns).collect(),
            used_bytes: of.samples.iter().map(|sample| sample.used_bytes).collect(),
            process_bytes: told.then(|| of.samples.iter().map(own).collect()),
            nccl_bytes: nccl.map(|nccl| of.samples.iter().map(|sample| nccl.at(gpu.index, sample.time_ns)).collect()),
        })
    }
}

/// Of each two samples the one at which more was used.
fn halved(samples: &[Sample]) -> Vec<Sample> {
    let larger = |two: &[Sample]| two.iter().max_by_key(|sample| sample.used_bytes).cloned();
    samples.chunks(2).filter_map(larger).collect()
}
