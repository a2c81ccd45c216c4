//! Checks of this machine, with a fix for each missing item.

use crate::data::{self, DataRequest, DatasetName};
use serde::Serialize;
use std::path::{Path, PathBuf};
use terminal::{self, Page};
use vramlab::backends::{self, Needs};
use vramlab::instruments::nvtx;
use vramlab::{Bytes, CudaDriver, Driver, Profile, SimDriver, SimMemory};

/// Maximum length of the name of a check.
const WHAT: usize = 22;

/// State of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// It is there.
    Ok,
    /// It is not there; nothing breaks without it.
    Missing,
    /// It is there and does not work.
    Broken,
}

/// Result of one check.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// Name of the check.
    pub what: String,
    /// State.
    pub state: State,
    /// Observation.
    pub found: String,
    /// Fix; empty if none is needed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

/// Results of all checks.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// Findings in the order in which they matter.
    pub findings: Vec<Finding>,
}

impl Diagnosis {
    /// The findings, on which device a run would be, and how to start one.
    pub fn show(&self, page: &mut Page) {
        for finding in &self.findings {
            let mark = match finding.state {
                State::Ok => "ok",
                State::Missing => "--",
                State::Broken => "!!",
            };
            page.labelled(&format!("{mark}  {:WHAT$} ", finding.what), WHAT + 5, &finding.found);
            if !finding.advice.is_empty() {
                page.labelled("", WHAT + 5, &format!("-> {}", finding.advice));
            }
        }
        let (gpus, bad): (Vec<&Finding>, Vec<&Finding>) = self
            .findings
            .iter()
            .filter(|finding| finding.what.starts_with("GPU "))
            .partition(|gpu| gpu.state == State::Ok);
        let broken = self.findings.iter().filter(|finding| finding.state == State::Broken).count();
        let summary = match (gpus.first(), bad.first(), broken) {
            (Some(gpu), _, 0) => format!("A run uses the {} ({}).", gpu.what, gpu.found),
            (None, None, 0) => "No GPU can be used; a run uses the simulated one.".to_owned(),
            _ => "What is marked with !! above does not work; --device sim works without it.".to_owned(),
        };
        let device = if broken > 0 { "--alloc caching --device sim" } else { "--alloc caching" };
        page.end(summary, &terminal::command("trainer", device));
    }
}

fn finding(what: &str, state: State, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { what: what.into(), state, found: found.into(), advice: advice.into() }
}

/// Looks for driver, devices, pools, data and profiler. Starts no training and downloads nothing.
#[must_use]
pub fn examine(data_dir: Option<&Path>) -> Diagnosis {
    let mut findings = Vec::new();
    cuda(&mut findings);
    let simulated = SimDriver::new(Profile::h200(), SimMemory::Host).describe();
    findings.push(finding("simulated GPU", State::Ok, format!("{}, built in (--device sim)", simulated.name), ""));
    capabilities(&mut findings, simulated.pools, simulated.vmm);
    mnist(&mut findings, data_dir);
    profiler(&mut findings);
    Diagnosis { findings }
}

fn cuda(findings: &mut Vec<Finding>) {
    let devices = match CudaDriver::probe() {
        Ok(devices) => devices,
        Err(error) => {
            let advice = "training uses the simulated GPU; for a real one install NVIDIA's driver 550 or newer (no CUDA \
                          toolkit is needed)";
            findings.push(finding("CUDA driver", State::Missing, error.to_string(), advice));
            return;
        }
    };
    match CudaDriver::new(0) {
        Ok(driver) => findings.push(finding("CUDA driver", State::Ok, format!("CUDA {}", driver.driver_version()), "")),
        Err(error) => {
            let advice = "run nvidia-smi: another process may use the GPU exclusively";
            findings.push(finding("CUDA driver", State::Broken, error.to_string(), advice));
        }
    }
    for gpu in devices {
        let (major, minor) = gpu.compute_capability;
        let name = format!("GPU cuda:{}", gpu.ordinal);
        let text = format!("{}, compute capability {major}.{minor}, {}", gpu.name, Bytes(gpu.total_bytes));
        if (major, minor) >= (7, 5) {
            findings.push(finding(&name, State::Ok, text, ""));
        } else {
            findings.push(finding(&name, State::Broken, text, "the kernels need compute capability 7.5 or newer"));
        }
        capabilities(findings, gpu.pools, gpu.vmm);
    }
}

/// Device capabilities that some backends need.
fn capabilities(findings: &mut Vec<Finding>, pools: bool, vmm: bool) {
    for (what, there, need) in [("  stream-ordered pools", pools, Needs::Pools), ("  virtual memory", vmm, Needs::Vmm)]
    {
        if there {
            findings.push(finding(what, State::Ok, "supported", ""));
        } else {
            let missing = "not supported by this device, driver or system";
            findings.push(finding(what, State::Missing, missing, without(need)));
        }
    }
}

/// The backends that do not run on a device without a capability.
fn without(need: Needs) -> String {
    let all = backends::all().into_iter();
    let names: Vec<&str> = all.filter(|one| one.capabilities.needs == need).map(|one| one.name).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!("--alloc {} cannot run on it; the others can", names.join(", "))
    }
}

fn mnist(findings: &mut Vec<Finding>, data_dir: Option<&Path>) {
    let request =
        DataRequest { name: DatasetName::Mnist, data_dir: data_dir.map(Path::to_owned), seed: 0, offline: false };
    let location = data::locate_mnist(&request);
    let advice = "put the four files into a directory and name it with --data-dir or MNIST_DIR; without them --dataset \
                  auto tries a download and otherwise generates digits";
    if location.complete().is_some() {
        findings.push(finding("MNIST", State::Ok, location.to_string(), ""));
    } else {
        findings.push(finding("MNIST", State::Missing, location.to_string(), advice));
    }
}

fn profiler(findings: &mut Vec<Finding>) {
    match find_program("nsys") {
        Some(path) => findings.push(finding("Nsight Systems", State::Ok, path.display().to_string(), "")),
        None => {
            let advice = "install Nsight Systems to see runs on a timeline; NVTX ranges are on under it";
            findings.push(finding("Nsight Systems", State::Missing, "nsys is not on PATH", advice));
        }
    }
    if nvtx::tool_attached() {
        findings.push(finding("NVTX tool", State::Ok, "attached to this process; ranges are on", ""));
    } else {
        findings.push(finding("NVTX tool", State::Missing, "none attached; ranges are off and cost one branch", ""));
    }
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_lacks_is_said_with_the_backends_that_need_it() {
        for (pools, vmm, need) in [(false, true, Needs::Pools), (true, false, Needs::Vmm)] {
            let mut findings = Vec::new();
            capabilities(&mut findings, pools, vmm);
            let [problem] = findings.iter().filter(|one| one.state != State::Ok).collect::<Vec<_>>()[..] else {
                panic!("{findings:?}")
            };
            for backend in backends::all() {
                let named = problem.advice.split([' ', ',']).any(|word| word == backend.name);
                assert_eq!(named, backend.capabilities.needs == need, "{backend}: {}", problem.advice);
            }
        }
    }
}
