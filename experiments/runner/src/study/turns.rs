//! Turns: the processes of a repeat run at the same time but work one by one, so that other load on the machine affects
//! all of them equally.

use super::process::Pipes;
use super::spec::Turns;
use chacha20::ChaCha8Rng;
use rand::SeedableRng;
use rand::seq::SliceRandom;
use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout};

/// A process that takes turns: it answers with a line once it is ready, and after each turn.
struct Player {
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Player {
    /// Waits for an answer; false if the process has ended.
    fn has_answered(&mut self) -> bool {
        self.answers.read_line(&mut String::new()).is_ok_and(|bytes| bytes > 0)
    }

    fn takes_turn(&mut self, request: u64) -> bool {
        writeln!(self.requests, "{request}").is_ok() && self.has_answered()
    }
}

/// Gives each process its turns; then their inputs end. A process that ends earlier loses only its own turns.
pub(super) fn take(turns: &Turns, seed: u64, processes: impl IntoIterator<Item = Pipes>) {
    let player = |(requests, answers)| Player { requests, answers: BufReader::new(answers) };
    let mut players: Vec<Player> = processes.into_iter().map(player).collect();
    players.retain_mut(Player::has_answered);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for _ in 0..turns.rounds {
        for request in &turns.requests {
            players.shuffle(&mut rng);
            players.retain_mut(|player| player.takes_turn(*request));
        }
    }
}
