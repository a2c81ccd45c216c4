//! Training steps as graphs: captured once, launched many times.

use super::Device;
use crate::arithmetic::Arithmetic;
use crate::error::Result;
use kernels::Operation;
use std::sync::Arc;
use vramlab::{Capture, Graph, Memory};

/// Graphs that were captured one after the other, with the memory that they share.
#[derive(Debug)]
pub struct StepGraphs {
    graph: Graph,
    /// What a launch of each computes, where the host does.
    operations: Vec<Vec<Box<dyn Operation>>>,
}

impl StepGraphs {
    /// Waits for the last launch and gives up the memory.
    ///
    /// # Errors
    /// Those of the driver and of the allocator.
    pub fn release(self) -> Result<()> {
        Ok(self.graph.release()?)
    }
}

impl Device {
    /// Captures the work that `queue` queues on the stream that is under way, as one graph for each number below `count`;
    /// nothing of it runs. All buffers that a call of it allocates are gone when that returns, so that graphs, which run one
    /// after another, can share their memory.
    ///
    /// # Errors
    /// Those of the driver and of the allocator, and of `queue`.
    pub fn capture(
        &self,
        memory: &Arc<Memory>,
        count: usize,
        mut queue: impl FnMut(usize) -> Result<()>,
    ) -> Result<StepGraphs> {
        let _range = self.range(format_args!("capture"));
        let mut capture = Capture::begin(memory, &self.driver(), self.stream())?;
        let mut operations = Vec::with_capacity(count);
        for number in 0..count {
            if number > 0 {
                capture.cut()?;
            }
            self.executor.begin_graph();
            let queued = queue(number);
            operations.push(self.executor.end_graph());
            queued?;
        }
        Ok(StepGraphs { graph: capture.end()?, operations })
    }

    /// Queues the graph of this number on the stream that is under way.
    ///
    /// # Errors
    /// Those of the driver, and on the simulated device of the operations.
    pub fn launch(&self, graphs: &mut StepGraphs, number: usize) -> Result<()> {
        graphs.graph.launch_nth(number, self.stream())?;
        // SAFETY: the memory is pinned as long as the graphs live; buffers from outside are live by the contract of the
        // capture.
        unsafe { self.executor.run_graph(&graphs.operations[number]) }
    }

    /// Has the kernels of linear layers ready, which cannot be loaded while a stream is captured.
    ///
    /// # Errors
    /// Those of loading them.
    pub(crate) fn prepare(&self, arithmetic: &Arithmetic) -> Result<()> {
        self.executor.prepare(arithmetic)
    }
}
