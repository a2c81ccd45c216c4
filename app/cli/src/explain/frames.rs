//! What a stack frame is: the user's code, a library's, PyTorch's, a node of autograd, an operator, or what stands between these; and how
//! it reads.

use std::borrow::Cow;

/// What frames of a cuBLAS handle's workspace are called.
pub(super) const CUBLAS_WORKSPACE: &str = "cuBLAS workspace";

/// What a frame is to a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind<'n> {
    User,
    Library,
    /// What `torch.compile` wrote.
    Compiled,
    /// Python of PyTorch, and Python's own.
    PyTorch,
    /// Memory that a library of NVIDIA's works in.
    Workspace(&'static str),
    /// A node of autograd's graph, by its name.
    Node(&'n str),
    /// Autograd's engine, which runs the nodes.
    Engine,
    /// An operator of ATen, by its name.
    Operator(&'n str),
    /// Other C++.
    Native,
    /// What records the stack, and the allocator itself: never the place that an allocation came from.
    Recorder,
    /// The interpreter in C, the dispatcher, the system's libraries: what stands between places.
    Between,
}

impl<'n> Kind<'n> {
    pub(super) fn of(name: &'n str, file: &str) -> Self {
        let file = &*slashes(file);
        if is_native(name, file) {
            return Self::of_native(name);
        }
        if inductor(file).is_some()
            || file_name(file).starts_with("fx_generated_")
            || file.starts_with("<eval_with_key>")
        {
            return Self::Compiled;
        }
        if cell(file).is_some() || file.starts_with("<stdin>") {
            return Self::User;
        }
        if let Some(path) = in_packages(file) {
            let plumbing = ["torch/", "triton/", "functorch/", "torchgen/"].iter().any(|name| path.starts_with(name));
            return if plumbing { Self::PyTorch } else { Self::Library };
        }
        let torch = file.contains("/torch/") || file.starts_with("torch/") || file.contains("/triton/");
        if file.starts_with('<') || torch || is_of_python(file) { Self::PyTorch } else { Self::User }
    }

    fn of_native(name: &'n str) -> Self {
        let path = without_arguments(name);
        let is = |parts: &[&str]| parts.iter().any(|part| path.contains(part));
        if is(&["unwind::unwind", "CapturedTraceback::", "gather_with_cpp", "CachingAllocator::"])
            || path.ends_with("(anonymous namespace)::gather")
        {
            return Self::Recorder;
        }
        // The interpreter and the system's libraries are written in C.
        if !path.contains("::") {
            return Self::Between;
        }
        if is(&["CUDABlasLtWorkspace", "CublasLtWorkspace"]) {
            return Self::Workspace("cuBLASLt workspace");
        }
        if is(&["WorkspaceForHandle", "CUDABlasWorkspace", "cublasSetWorkspace"]) {
            return Self::Workspace(CUBLAS_WORKSPACE);
        }
        if is(&["::run_conv_plan", "::run_fused_conv_plan"]) || path.starts_with("at::native::Workspace::") {
            return Self::Workspace("cuDNN workspace");
        }
        if path.contains("torch::autograd::Engine::evaluate_function") {
            return Self::Engine;
        }
        if let Some(node) = node(path) {
            return Self::Node(node);
        }
        if let Some(operator) = path.strip_prefix("at::_ops::") {
            return Self::Operator(operator.split("::").next().unwrap_or(operator));
        }
        // What a template returns stands before its name.
        let plain = path.split('<').next().unwrap_or(path);
        let named = plain.rsplit(' ').find(|word| !word.starts_with("namespace)"));
        let whose = named.unwrap_or(plain).split("::").next().unwrap_or(plain);
        let between = ["at", "c10", "torch", "caffe2", "std", "__gnu_cxx", "pybind11", "cudnn_frontend"];
        if between.contains(&whose) || whose.starts_with("dynamo_") { Self::Between } else { Self::Native }
    }
}

/// The node that a function of C++ runs: `DivBackward0` of `torch::autograd::generated::DivBackward0::apply`.
fn node(path: &str) -> Option<&str> {
    let class = path.strip_suffix("::apply").or_else(|| path.strip_suffix("_apply_functional"))?;
    // Functions in Python have frames of their own, and `Function<Scan>::apply` is the forward pass of one in C++.
    if class.ends_with("::PyNode") || class.ends_with("::PyFunction") || class.contains("Function<") {
        return None;
    }
    // A function in C++ is `torch::autograd::CppNode<MyFunction>`.
    if let Some((_, function)) = class.split_once("CppNode<") {
        return function.strip_suffix('>').map(last_part);
    }
    let node = last_part(class);
    let known =
        node.contains("Backward") || node.starts_with("AccumulateGrad") || path.starts_with("torch::autograd::");
    known.then_some(node)
}

/// The last part of a name in C++.
fn last_part(name: &str) -> &str {
    name.rsplit("::").next().unwrap_or(name)
}

/// A function of C++ without its arguments and what follows them.
fn without_arguments(name: &str) -> &str {
    let anonymous = "(anonymous namespace)";
    let mut from = name.find("operator()").map_or(0, |at| at + "operator()".len());
    while let Some(at) = name[from..].find('(') {
        if !name[from + at..].starts_with(anonymous) {
            return &name[..from + at];
        }
        from += at + anonymous.len();
    }
    name
}

/// Whether a frame is of compiled code.
fn is_native(name: &str, file: &str) -> bool {
    let ends = [
        ".cpp", ".cc", ".c", ".cxx", ".cu", ".cuh", ".h", ".hpp", ".so", ".inc", ".o", ".a", ".s", ".S", ".dll",
        ".pyd", ".lto",
    ];
    let source = ends.iter().any(|end| file.ends_with(end)) || file.contains(".so.");
    source || file == "??" || file.is_empty() || !file.ends_with(".py") && name.contains("::")
}

/// Whether a file is one of Python's own.
fn is_of_python(file: &str) -> bool {
    if file.contains("/lib/python3") || file.contains("/lib64/python3") {
        return true;
    }
    // On Windows: `C:/Users/me/miniconda3/Lib/threading.py`, `…/envs/me/Lib/threading.py`.
    let folders: Vec<String> = file.split('/').map(str::to_lowercase).collect();
    let home = |above: &[String]| {
        above.last().is_some_and(|last| last.contains("python") || last.contains("conda") || last.contains("miniforge"))
            || above.len() > 1 && above[above.len() - 2] == "envs"
    };
    file.get(1..3) == Some(":/")
        && folders.iter().enumerate().any(|(at, folder)| folder == "lib" && home(&folders[..at]))
}

/// A path with the slashes of Linux.
pub(super) fn slashes(file: &str) -> Cow<'_, str> {
    if file.contains('\\') { Cow::Owned(file.replace('\\', "/")) } else { Cow::Borrowed(file) }
}

fn file_name(file: &str) -> &str {
    file.rsplit('/').next().unwrap_or(file)
}

/// The path of a library's file from its package on.
pub(super) fn in_packages(file: &str) -> Option<&str> {
    let folders = ["site-packages/", "dist-packages/"];
    folders.iter().find_map(|folder| file.rsplit_once(folder)).map(|(_, path)| path)
}

/// The number of a notebook's cell: how often cells had been run, or the one that IPython gave its text.
fn cell(file: &str) -> Option<&str> {
    let name = file_name(file).trim_start_matches('<').trim_end_matches('>');
    let number = name.strip_prefix("ipython-input-").or_else(|| name.strip_prefix("command-"));
    let number = number.or_else(|| file.contains("/ipykernel_").then_some(name))?;
    let number = number.strip_suffix(".py").unwrap_or(number);
    Some(number.split('-').next().unwrap_or(number))
}

/// The name of a file in Inductor's cache, whose folder has the second and third letter of it: `ab/cabcdef….py`.
fn inductor(file: &str) -> Option<&str> {
    let stem = file_name(file).strip_suffix(".py")?;
    let folder = file.rsplit('/').nth(1);
    let by_hash = stem.len() > 40 && stem.starts_with('c') && stem.get(1..3).is_some_and(|of| folder == Some(of));
    (by_hash || file.contains("torchinductor")).then_some(stem)
}

/// Letters of the names in Inductor's cache that are shown; all of them begin with `c`.
const OF_HASH: usize = 8;

/// The end of a path that tells files apart: of a library from its package on, else the last two parts; for what PyTorch and
/// notebooks name by numbers, words.
pub(super) fn short(file: &str) -> String {
    let file = &*slashes(file);
    if let Some(number) = cell(file) {
        return format!("notebook cell {number}");
    }
    if let Some(stem) = inductor(file) {
        return match stem.get(..OF_HASH) {
            Some(begins) if stem.len() > OF_HASH => format!("torch.compile's {begins}….py"),
            _ => format!("torch.compile's {stem}.py"),
        };
    }
    let file = in_packages(file).unwrap_or(file);
    let mut parts = file.rmatch_indices('/');
    parts.nth(1).map_or(file, |(at, _)| &file[at + 1..]).to_owned()
}

/// A frame in words: `proj/train.py:14 step`.
pub(super) fn place(name: &str, file: &str, line: u32, shown: impl Fn(&str) -> String) -> String {
    match (file, line) {
        ("" | "??", _) => without_arguments(name).to_owned(),
        // What has no lines, as a layer of a network, and C++ without them.
        (_, 0) if is_native(name, file) => without_arguments(name).to_owned(),
        (file, 0) => format!("{} {name}", shown(file)),
        (file, line) => format!("{}:{line} {name}", shown(file)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_apart() {
        for (file, kind) in [
            ("train.py", Kind::User),
            ("/home/me/proj/torch_models/net.py", Kind::User),
            ("layer 3", Kind::User),
            (r"C:\Users\me\proj\train.py", Kind::User),
            ("/tmp/ipykernel_123/456.py", Kind::User),
            ("<ipython-input-3-0123abcd>", Kind::User),
            ("<stdin>", Kind::User),
            ("/opt/venv/lib/python3.12/site-packages/transformers/models/gpt2.py", Kind::Library),
            (r"C:\Users\me\miniconda3\Lib\site-packages\transformers\trainer.py", Kind::Library),
            ("/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", Kind::PyTorch),
            (r"C:\Users\me\site-packages\torch\nn\modules\linear.py", Kind::PyTorch),
            (r"C:\Users\me\miniconda3\Lib\threading.py", Kind::PyTorch),
            (r"C:\Python311\lib\threading.py", Kind::PyTorch),
            ("site-packages/torch/_tensor.py", Kind::PyTorch),
            ("/usr/lib/python3.12/threading.py", Kind::PyTorch),
            ("<frozen importlib._bootstrap>", Kind::PyTorch),
            ("<eval_with_key>.3", Kind::Compiled),
            ("/tmp/torchinductor_me/ab/cabcdefghijk.py", Kind::Compiled),
            ("/pytorch/aten/src/ATen/EmptyTensor.cpp", Kind::Between),
            ("/cache/ev/cevdrybnum7za6sx7nsxygfstym6gfzydvniixyq3wpqwknt4nz4.py", Kind::Compiled),
            ("thread48.o", Kind::Between),
            ("../sysdeps/unix/sysv/linux/x86_64/clone3.S", Kind::Between),
            ("/lib/x86_64-linux-gnu/libc.so.6", Kind::Between),
            ("??", Kind::Between),
            ("", Kind::Between),
        ] {
            assert_eq!(Kind::of("f", file), kind, "{file}");
        }
    }

    #[test]
    fn functions_of_cpp_are_told_apart() {
        for (name, kind) in [
            ("torch::unwind::unwind()", Kind::Recorder),
            ("torch::CapturedTraceback::gather(bool, bool, bool)", Kind::Recorder),
            ("torch::cuda::(anonymous namespace)::gather_with_cpp()", Kind::Recorder),
            (
                "c10::cuda::CUDACachingAllocator::Native::DeviceCachingAllocator::malloc(unsigned long, CUstream_st*)",
                Kind::Recorder,
            ),
            ("at::cuda::getCUDABlasLtWorkspace()", Kind::Workspace("cuBLASLt workspace")),
            (
                "at::cuda::setWorkspaceForHandle(cublasContext*, c10::cuda::CUDAStream)",
                Kind::Workspace("cuBLAS workspace"),
            ),
            ("at::native::run_conv_plan(cudnnContext*, at::Tensor const&)", Kind::Workspace("cuDNN workspace")),
            ("torch::autograd::generated::DivBackward0::apply(std::vector<at::Tensor>&&)", Kind::Node("DivBackward0")),
            ("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)", Kind::Node("AccumulateGrad")),
            ("torch::autograd::CppNode<mine::Scan>::apply(std::vector<at::Tensor>&&)", Kind::Node("Scan")),
            ("torch::autograd::PyNode::apply(std::vector<at::Tensor>&&)", Kind::Between),
            ("torch::autograd::Function<mine::Scan>::apply(at::Tensor)", Kind::Between),
            ("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)", Kind::Engine),
            ("at::_ops::addmm::call(at::Tensor const&)", Kind::Operator("addmm")),
            ("at::_ops::gather::call(at::Tensor const&, long)", Kind::Operator("gather")),
            ("bool at::cuda::blas::gemm_and_bias<float, float>(bool, bool)", Kind::Between),
            ("at::(anonymous namespace)::create_out(c10::ArrayRef<long>)", Kind::Between),
            ("mine::scan(at::Tensor)", Kind::Native),
            ("void mine::scan<float>(at::Tensor)", Kind::Native),
            ("std::error_code::default_error_condition() const", Kind::Between),
            ("execute_native_thread_routine", Kind::Between),
            ("_PyEval_EvalFrameDefault", Kind::Between),
        ] {
            assert_eq!(Kind::of(name, "??"), kind, "{name}");
            assert_eq!(Kind::of(name, "thread48.o"), kind, "{name}");
        }
    }

    #[test]
    fn paths_are_short() {
        for (file, said) in [
            ("/a/b/c/train.py", "c/train.py"),
            ("train.py", "train.py"),
            ("/x/site-packages/torch/optim/adam.py", "optim/adam.py"),
            (r"C:\Users\x\site-packages\torch\nn\modules\linear.py", "modules/linear.py"),
            (r"C:\Users\x\proj\train.py", "proj/train.py"),
            ("/tmp/torchinductor_user/ab/cabcdefghijkl.py", "torch.compile's cabcdefg….py"),
            ("/tmp/ipykernel_123/456.py", "notebook cell 456"),
            (r"C:\Users\x\AppData\Local\Temp\ipykernel_123\456.py", "notebook cell 456"),
            ("<ipython-input-3-0123abcd>", "notebook cell 3"),
            ("/tmp/ipython-input-7-99.py", "notebook cell 7"),
        ] {
            assert_eq!(short(file), said);
        }
    }
}
