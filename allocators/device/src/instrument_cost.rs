//! What an instrument itself costs.

use serde::{Deserialize, Serialize};

/// What an instrument itself costs, measured at the start of the run on this machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstrumentCost {
    /// Name of the instrument.
    pub instrument: String,
    /// Host nanoseconds that it adds to one operation; negative when it is lost in the noise.
    pub ns_per_operation: f64,
    /// How that was measured.
    pub method: String,
}
