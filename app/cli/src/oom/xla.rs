//! Messages of XLA, under JAX or TensorFlow, and of TensorFlow.

use super::lines::{joined, window};
use super::text::{Facts, Reporter, leading_number, number_after, size, size_after, size_before};

/// Words of the BFC allocator, which TensorFlow and XLA share.
const RAN_OUT: &str = "ran out of memory trying to allocate ";

/// The text without the BFC allocator's warnings about requests whose caller continues, and the last of these.
pub(super) fn without_warnings(text: &str) -> (String, Option<Facts>) {
    let mut parts = text.split(RAN_OUT);
    let mut out = parts.next().unwrap_or_default().to_owned();
    let mut warning = None;
    for part in parts {
        if joined(window(part, 0, 300)).contains("this is not a failure") {
            warning = Some(Facts { requested_bytes: size(part), ..Facts::default() });
        } else {
            out.push_str(RAN_OUT);
        }
        out.push_str(part);
    }
    (out, warning)
}

pub(super) fn tensorflow(text: &str) -> Option<(Reporter, Facts)> {
    if let Some((_, message)) = text.rsplit_once("OOM when allocating tensor with shape[") {
        let (shape, rest) = message.split_once("] and type ")?;
        let bytes_each = match rest.split([' ', ',', '\n']).next()? {
            "double" | "int64" | "uint64" | "complex64" => 8,
            "half" | "float16" | "bfloat16" | "int16" | "uint16" => 2,
            "bool" | "int8" | "uint8" => 1,
            "complex128" => 16,
            _ => 4,
        };
        let sides = shape.split(',').map(|side| side.trim().parse::<u64>());
        let requested =
            sides.into_iter().try_fold(bytes_each, |bytes: u64, side| Some(bytes.saturating_mul(side.ok()?)));
        let gpu = number_after(rest, "device:GPU:");
        let is_host = rest.split_once("by allocator ").is_some_and(|(_, name)| name.starts_with("cpu"));
        let source = if is_host { Reporter::TensorflowCpu } else { Reporter::Tensorflow };
        return Some((source, Facts { failures: 1, gpu, requested_bytes: requested, ..Facts::default() }));
    }
    let at = text.rfind(RAN_OUT)?;
    // Under JAX the allocator logs its failure, and XLA reports it.
    if xla(&text[at..]).is_some_and(|(_, facts)| facts.requested_bytes.is_some()) {
        return None;
    }
    let message = joined(window(text, at, 300));
    let value = |key: &str| {
        let (_, rest) = text.rsplit_once(key)?;
        leading_number(rest.trim_start())
    };
    let rounded = message.split_once("(rounded to ").and_then(|(_, rest)| leading_number(rest));
    let (limit, in_use) = (value("Limit:"), value("InUse:"));
    let facts = Facts {
        failures: text.matches(RAN_OUT).count() as u64,
        gpu: text[..at].rsplit_once("GPU_").and_then(|(_, rest)| leading_number(rest)),
        requested_bytes: rounded.or_else(|| size_after(&message, "trying to allocate ")),
        limit_bytes: limit,
        allocated_bytes: in_use,
        unallocated_bytes: limit.zip(in_use).map(|(limit, in_use)| limit.saturating_sub(in_use)),
        ..Facts::default()
    };
    Some((Reporter::Tensorflow, facts))
}

pub(super) fn xla(text: &str) -> Option<(Reporter, Facts)> {
    let at = text.rfind("Out of memory while trying to allocate ").or_else(|| exhausted(text))?;
    let message = &text[at..];
    let line = joined(message);
    if let Some(facts) = tpu(&line) {
        return Some((Reporter::XlaTpu, facts));
    }
    let requested = ["while trying to allocate ", "Out of memory allocating ", "Failed to allocate request for "];
    let facts = Facts {
        failures: text.matches("while trying to allocate").count().max(1) as u64,
        requested_bytes: requested.iter().find_map(|front| size_after(&line, front)),
        // The total need of the compiled function.
        allocated_bytes: message.split_once("total allocation:").and_then(|(_, rest)| size(rest)),
        unallocated_bytes: message.split_once("total fragmentation:").and_then(|(_, rest)| size(rest)),
        ..Facts::default()
    };
    Some((Reporter::Xla, facts))
}

/// A TPU's memory: while it compiles, and while it runs.
fn tpu(line: &str) -> Option<Facts> {
    if let Some((_, used)) = line.split_once("in memory space hbm. Used ") {
        let total_bytes = size(used.split_once(" of ")?.1);
        return Some(Facts { failures: 1, requested_bytes: size(used), total_bytes, ..Facts::default() });
    }
    let (_, reserve) = line.split_once("Attempting to reserve ")?;
    // Free memory that is in pieces cannot be reserved.
    let free_bytes = size_before(reserve, " reservable").or_else(|| size_after(reserve, "There are "));
    Some(Facts { failures: 1, requested_bytes: size(reserve), free_bytes, ..Facts::default() })
}

/// Where the last status of exhausted memory begins. Other resources have it, too, as the length of gRPC's messages.
fn exhausted(text: &str) -> Option<usize> {
    let statuses = ["RESOURCE_EXHAUSTED", "Resource exhausted: "];
    let is_memory = |at: &usize| {
        let message = joined(window(text, *at, 120)).to_lowercase();
        ["memory", "allocat"].iter().any(|word| message.contains(word))
    };
    statuses.iter().find_map(|status| text.rmatch_indices(status).map(|(at, _)| at).find(is_memory))
}

#[cfg(test)]
mod tests {
    use super::super::text::read;
    use super::*;

    const WARNING: &str = "W tensorflow/tsl/framework/bfc_allocator.cc:296] Allocator (GPU_0_bfc) ran out of memory trying to allocate \
                           4.49GiB with freed_by_count=0. The caller indicates that this is not a failure, but this may mean that \
                           there could be performance gains if more memory were available.\n";

    #[test]
    fn a_warning_gives_way_to_the_failure() {
        let failure = "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3199993600 bytes.";
        // flatironinstitute/nemos
        let (source, facts) = read(&format!("{WARNING}{WARNING}{failure}")).unwrap();
        assert_eq!((source, facts.requested_bytes), (Reporter::Xla, Some(3_199_993_600)));
        let (source, facts) = read(WARNING).unwrap();
        assert_eq!((source, facts.failures), (Reporter::Tensorflow, 0));
        assert_eq!(facts.requested_bytes, size("4.49GiB"));
        // A failure of TensorFlow between warnings, and NCCL's behind one.
        let real = "Allocator (GPU_1_bfc) ran out of memory trying to allocate 2.00GiB (rounded to 2147483648)requested by op a\n";
        let (source, facts) = read(&format!("{WARNING}{real}{WARNING}")).unwrap();
        assert_eq!((source, facts.gpu, facts.failures), (Reporter::Tensorflow, Some(1), 1));
        assert_eq!(facts.requested_bytes, Some(2 << 30));
        let (source, _) = read(&format!("{WARNING}NCCL WARN Cuda failure 2 'out of memory'")).unwrap();
        assert_eq!(source, Reporter::Nccl);
    }

    #[test]
    fn the_allocator_under_jax_gives_way_to_xla() {
        let text = "Allocator (GPU_0_bfc) ran out of memory trying to allocate 16.00GiB (rounded to 17179869184)requested by op \n\
                    jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.";
        let (source, facts) = read(text).unwrap();
        assert_eq!((source, facts.requested_bytes), (Reporter::Xla, Some(16 << 30)));
    }

    #[test]
    fn host_memory_is_not_the_gpus() {
        let text = "ResourceExhaustedError: OOM when allocating tensor with shape[200000,8192] and type float on \
                    /job:localhost/replica:0/task:0/device:CPU:0 by allocator cpu [Op:Mul]";
        let (source, facts) = read(text).unwrap();
        assert_eq!((source, facts.requested_bytes), (Reporter::TensorflowCpu, Some(200_000 * 8192 * 4)));
    }

    #[test]
    fn a_long_message_of_grpc_is_not_about_memory() {
        let grpc = "status = StatusCode.RESOURCE_EXHAUSTED\ndetails = \"Received message larger than max (8388720 vs. 4194304)\"\n";
        assert_eq!(read(grpc), None);
        let failure = "RESOURCE_EXHAUSTED: Failed to allocate request for 4.00GiB (4294967296B) on device ordinal 0\n";
        assert_eq!(read(&format!("{failure}{grpc}")).unwrap().1.requested_bytes, Some(4 << 30));
    }
    #[test]
    fn a_tpus_sizes_are_read() {
        let text = "XlaRuntimeError: RESOURCE_EXHAUSTED: TPU backend error: Ran out of memory in memory space hbm. Used 17.25G of \
                    15.48G hbm. Exceeded hbm capacity by 1.77G.";
        let (source, facts) = read(text).unwrap();
        assert_eq!(
            (source, facts.requested_bytes, facts.total_bytes),
            (Reporter::XlaTpu, size("17.25G"), size("15.48G"))
        );
        let text = "XlaRuntimeError: RESOURCE_EXHAUSTED: Attempting to reserve 9.54G at the bottom of memory. That was not possible. \
                    There are 9.60G free, 0B reserved, and 7.48G reservable.";
        let (source, facts) = read(text).unwrap();
        assert_eq!((source, facts.requested_bytes, facts.free_bytes), (Reporter::XlaTpu, size("9.54G"), size("7.48G")));
    }
}
