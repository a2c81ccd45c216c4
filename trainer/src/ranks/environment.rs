//! Which rank of which run this process is: from its options and from the variables of torchrun, Slurm and MPI.

use super::{Meeting, Membership};
use crate::error::{Result, TrainError};
use crate::settings::Settings;
use std::env;
use std::time::Duration;

/// Set for the ranks that this program starts: names the run, and tells rank 0 that its standard input is the socket that listens.
pub(super) const LAUNCHED: &str = "VRAMLAB_RANKS";

/// Names of the variables with rank, number of ranks, and rank on this host, by launcher.
const LAUNCHERS: [[&str; 3]; 3] = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
];

/// The part of a process in a run.
#[derive(Debug)]
pub(crate) enum Part {
    /// All of the run.
    Alone,
    /// Start this many ranks.
    Launcher(u32),
    /// One rank.
    Rank(Membership),
}

impl Part {
    /// The part of this process.
    ///
    /// # Errors
    /// [`TrainError::Input`] that names the variable or option that cannot work.
    pub(crate) fn of(settings: &Settings) -> Result<Self> {
        Self::from(settings, |name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(settings: &Settings, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let master = variable("MASTER_ADDR");
        // Slurm and MPI set theirs for programs that have nothing to do with each other; with an address they are ranks of one.
        let launcher =
            LAUNCHERS.into_iter().find(|[rank, size, _]| variable(rank).is_some() && variable(size).is_some());
        let launcher = launcher.filter(|[rank, ..]| *rank == "RANK" || master.is_some());
        let Some([rank_name, size_name, local_name]) = launcher else {
            return match settings.gpus {
                None | Some(1) => only_ranks(settings).map(|()| Self::Alone),
                Some(0) => Err(TrainError::Input("--gpus must be at least 1".into())),
                Some(gpus) => Ok(Self::Launcher(gpus)),
            };
        };
        let number = |name: &str| -> Result<u32> {
            let text = variable(name).unwrap_or_default();
            text.trim().parse().map_err(|_| TrainError::Input(format!("{name} must be a number, found '{text}'")))
        };
        let (rank, size) = (number(rank_name)?, number(size_name)?);
        if rank >= size {
            return Err(TrainError::Input(format!("{rank_name}={rank} must be below {size_name}={size}")));
        }
        match settings.gpus {
            Some(0) => return Err(TrainError::Input("--gpus must be at least 1".into())),
            Some(gpus) if gpus != size => {
                return Err(TrainError::Input(format!(
                    "--gpus {gpus} and {size_name}={size} differ; leave --gpus out under a launcher"
                )));
            }
            _ => {}
        }
        if size == 1 {
            return only_ranks(settings).map(|()| Self::Alone);
        }
        let local_rank = if variable(local_name).is_some() { number(local_name)? } else { rank };
        let run = variable(LAUNCHED);
        let patience = Duration::from_secs(settings.rank_timeout.into());
        #[cfg(unix)]
        if run.is_some() && rank == 0 {
            let (run, meeting) = (run.unwrap_or_default(), Meeting::Inherited(super::launch::inherited_socket()?));
            return Ok(Self::Rank(Membership { rank, size, local_rank, run, meeting, patience }));
        }
        let host = master.ok_or_else(|| {
            TrainError::Input(format!(
                "{rank_name} and {size_name} are set and MASTER_ADDR is not; set it to the host of rank 0"
            ))
        })?;
        let port = match variable("MASTER_PORT") {
            None => {
                return Err(TrainError::Input(
                    "MASTER_ADDR is set and MASTER_PORT is not; set it to a free port".into(),
                ));
            }
            Some(text) => text.trim().parse().ok().filter(|port| *port > 0).ok_or_else(|| {
                TrainError::Input(format!("MASTER_PORT must be a number from 1 to 65535, found '{text}'"))
            })?,
        };
        // The agent of torchrun listens at MASTER_PORT itself, for the store of PyTorch's ranks; these ranks meet one port further.
        let agent_listens = variable("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        let port = if agent_listens { if port == u16::MAX { port - 1 } else { port + 1 } } else { port };
        // Another run on the same port has another name where its launcher gives one.
        let run =
            run.or_else(|| variable("TORCHELASTIC_RUN_ID")).or_else(|| variable("SLURM_JOB_ID")).unwrap_or_default();
        let meeting = Meeting::At { host, port };
        Ok(Self::Rank(Membership { rank, size, local_rank, run, meeting, patience }))
    }
}

/// Refuses options that mean nothing without several ranks.
fn only_ranks(settings: &Settings) -> Result<()> {
    let given = [
        ("--bucket", settings.bucket.is_some()),
        ("--overlap", settings.overlap.is_some()),
        ("--buffers", settings.buffers.is_some()),
        ("--comm-streams", settings.comm_streams.is_some()),
        ("--bucket-source", settings.bucket_source.is_some()),
        ("--register", settings.register.is_some()),
        ("--peer-access", settings.peer_access.is_some()),
        ("--rank-alloc", !settings.rank_alloc.is_empty()),
    ];
    match given.into_iter().find(|(_, given)| *given) {
        Some((name, _)) => {
            Err(TrainError::Input(format!("{name} is for several ranks; add --gpus 2, or leave it out")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Variables<'a> = &'a [(&'a str, &'a str)];

    fn part(gpus: Option<u32>, variables: Variables<'_>) -> Result<Part> {
        let settings = Settings { gpus, ..Settings::default() };
        let value = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Part::from(&settings, value)
    }

    #[test]
    fn a_process_is_a_rank_under_every_launcher() {
        for [rank, size, local] in LAUNCHERS {
            let variables =
                [(rank, "5"), (size, "8"), (local, "1"), ("MASTER_ADDR", "node7"), ("MASTER_PORT", "29500")];
            let Ok(Part::Rank(membership)) = part(None, &variables) else { panic!("{rank}") };
            assert_eq!((membership.rank, membership.size, membership.local_rank), (5, 8, 1));
            assert!(matches!(membership.meeting, Meeting::At { host, port: 29500 } if host == "node7"));
        }
    }

    #[test]
    fn ranks_of_torchrun_meet_beside_the_port_of_its_store() {
        for (store, expected) in [("True", 29501), ("False", 29500)] {
            let variables = [
                ("RANK", "1"),
                ("WORLD_SIZE", "2"),
                ("MASTER_ADDR", "node7"),
                ("MASTER_PORT", "29500"),
                ("TORCHELASTIC_USE_AGENT_STORE", store),
            ];
            let Ok(Part::Rank(membership)) = part(None, &variables) else { panic!("{store}") };
            assert!(matches!(membership.meeting, Meeting::At { port, .. } if port == expected), "{membership:?}");
        }
    }

    #[test]
    fn a_program_in_a_job_without_an_address_runs_alone() {
        assert!(matches!(part(None, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "4")]), Ok(Part::Alone)));
        assert!(matches!(part(None, &[("RANK", "0"), ("WORLD_SIZE", "1")]), Ok(Part::Alone)));
        assert!(matches!(part(Some(1), &[]), Ok(Part::Alone)));
        assert!(matches!(part(Some(4), &[]), Ok(Part::Launcher(4))));
    }

    #[test]
    fn variables_that_cannot_work_are_named() {
        let cases: [(Option<u32>, Variables<'_>, &str); 8] = [
            (Some(0), &[], "--gpus must be at least 1"),
            (Some(0), &[("RANK", "0"), ("WORLD_SIZE", "2")], "--gpus must be at least 1"),
            (None, &[("RANK", "x"), ("WORLD_SIZE", "2")], "RANK must be a number, found 'x'"),
            (None, &[("RANK", "2"), ("WORLD_SIZE", "2")], "RANK=2 must be below WORLD_SIZE=2"),
            (Some(3), &[("RANK", "1"), ("WORLD_SIZE", "2")], "--gpus 3 and WORLD_SIZE=2 differ"),
            (None, &[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR is not"),
            (None, &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "MASTER_PORT is not"),
            (
                None,
                &[("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "70000")],
                "MASTER_PORT must be a number from 1 to 65535, found '70000'",
            ),
        ];
        for (gpus, variables, words) in cases {
            let error = part(gpus, variables).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn options_of_ranks_need_ranks() {
        let settings = Settings { bucket: Some(1), ..Settings::default() };
        let error = Part::from(&settings, |_| None).unwrap_err().to_string();
        assert!(error.contains("--bucket is for several ranks"), "{error}");
    }
}
