//! Functions and lines of a program's call stacks, from what its files contain.

use addr2line::{Loader, demangle_auto};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use vramlab::histories::calls::{NotedFrame, Notes};

/// Frames of a stack, with those of inlined functions.
const DEPTH: usize = 32;
/// Characters of a name: instances of templates can have thousands, and readers limit the length of a line.
const NAME: usize = 300;

/// A location in a program, with the keys of PyTorch's frames.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Place {
    /// Function; empty if unknown.
    pub(crate) name: String,
    /// Source file; the program or library where its lines are unknown.
    pub(crate) filename: String,
    /// Line, 0 if unknown.
    pub(crate) line: u32,
}

/// The places of all frames of a process.
#[derive(Debug, Default)]
pub(super) struct Symbols {
    /// By number of the frame, the innermost inlined function first.
    places: BTreeMap<u32, Vec<Place>>,
}

impl Symbols {
    /// Looks at each file that frames are from, once.
    pub(super) fn of(notes: &Notes) -> Self {
        let mut by_module: BTreeMap<&str, Vec<(u32, u64)>> = BTreeMap::new();
        for (number, NotedFrame { module, address }) in notes.frames() {
            by_module.entry(module).or_default().push((number, *address));
        }
        let mut places = BTreeMap::new();
        for (module, frames) in by_module {
            // A file that is gone, or is none, leaves addresses.
            let loader = Path::new(module).is_file().then(|| Loader::new(module).ok()).flatten();
            places.extend(
                frames.into_iter().map(|(number, address)| (number, places_of(loader.as_ref(), module, address))),
            );
        }
        Self { places }
    }

    /// The places of a stack, the innermost first, without the functions of CUDA's libraries at its end.
    pub(super) fn stack(&self, notes: &Notes, number: u32) -> Vec<Place> {
        let places = notes.stack(number).flat_map(|(frame, _)| self.places.get(&frame).into_iter().flatten());
        let mut stack: Vec<Place> = places.skip_while(|place| place.is_of_cuda()).take(DEPTH).cloned().collect();
        // The frames that start a program are not lines of it.
        if let Some(outermost) = stack.iter().rposition(|place| place.line > 0) {
            stack.truncate(outermost + 1);
        }
        stack
    }
}

/// The functions at an address; one without a name where the file does not say.
fn places_of(loader: Option<&Loader>, module: &str, address: u64) -> Vec<Place> {
    let mut out = Vec::new();
    if let Some(mut frames) = loader.and_then(|loader| loader.find_frames(address).ok()) {
        while let Ok(Some(frame)) = frames.next() {
            let name = frame.function.as_ref().and_then(|function| Some(function.demangle().ok()?.into_owned()));
            let file = frame.location.as_ref().and_then(|location| location.file);
            let line = frame.location.as_ref().and_then(|location| location.line).unwrap_or(0);
            if name.is_some() || file.is_some() {
                out.push(place(&name.unwrap_or_default(), file.unwrap_or(module), line));
            }
        }
    }
    if out.iter().all(|place| place.name.is_empty()) {
        let symbol = loader.and_then(|loader| loader.find_symbol(address));
        let name = symbol.map_or_else(String::new, demangled);
        match out.first_mut() {
            Some(first) => *first = place(&name, &first.filename, first.line),
            None => out.push(place(&name, module, 0)),
        }
    }
    out
}

/// A place with texts of limited length.
fn place(name: &str, filename: &str, line: u32) -> Place {
    let clipped = |text: &str| text.chars().take(NAME).collect();
    Place { name: clipped(name), filename: clipped(filename), line }
}

/// A name as the source has it.
pub(super) fn demangled(name: &str) -> String {
    demangle_auto(Cow::Borrowed(name), None).into_owned()
}

/// A function's name without its arguments: `gemm` for `void gemm<4>(float*, int)`.
pub(super) fn short(name: &str) -> String {
    let name = demangled(name);
    let end = name.find(['(', '<']).filter(|end| *end > 0).unwrap_or(name.len());
    name[..end].rsplit(' ').next().unwrap_or_default().to_owned()
}

impl Place {
    /// Whether it is in CUDA's runtime or driver, also where a program contains the runtime.
    fn is_of_cuda(&self) -> bool {
        let file = self.file();
        let named = ["cudart", "__cuda", "libcu"].iter().any(|start| self.name.starts_with(start))
            || self.name.strip_prefix("cuda").is_some_and(|rest| rest.starts_with(char::is_uppercase));
        named || ["libcuda", "libcudart", "cuda_runtime"].iter().any(|start| file.starts_with(start))
    }

    /// Whether it is in NCCL, also where a program contains NCCL.
    fn is_in_nccl(&self) -> bool {
        self.file().starts_with("libnccl") || self.name.starts_with("nccl")
    }

    /// Whether it is in a header or library of the system or of a toolkit.
    fn is_of_system(&self) -> bool {
        ["/usr/", "/opt/", "/lib"].iter().any(|start| self.filename.starts_with(start))
    }

    fn file(&self) -> &str {
        self.filename.rsplit('/').next().unwrap_or_default()
    }

    /// `matrix.cu:57`, else the function and the file.
    fn shown(&self) -> String {
        match (self.line, self.name.as_str()) {
            (0, "") => self.file().to_owned(),
            (0, name) => format!("{} ({})", short(name), self.file()),
            (line, _) => format!("{}:{line}", self.file()),
        }
    }
}

/// Whether NCCL made a call for memory of its own. `ncclMemAlloc` is the program's request.
pub(super) fn is_of_nccl(stack: &[Place]) -> bool {
    stack.first().is_some_and(Place::is_in_nccl) && stack.iter().all(|place| place.name != "ncclMemAlloc")
}

/// The place in the program that made a call: the innermost with a line outside of the system's headers, else the innermost that is
/// known at all.
pub(super) fn call_site(stack: &[Place]) -> Option<String> {
    let own = stack.iter().find(|place| place.line > 0 && !place.is_of_system());
    let known =
        || stack.iter().find(|place| place.line > 0).or_else(|| stack.iter().find(|place| !place.name.is_empty()));
    own.or_else(known).or(stack.first()).map(Place::shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_named_without_types_and_arguments() {
        for (name, shown) in [("_Z4gemmPfi", "gemm"), ("plain", "plain"), ("void ns::k<4>(int)", "ns::k"), ("", "")] {
            assert_eq!(short(name), shown);
        }
    }

    #[test]
    fn calls_of_nccl_for_memory_of_its_own_are_known_by_their_innermost_function() {
        let (library, program) = (place("", "/x/libnccl.so.2", 0), place("main", "main.cu", 3));
        let linked = place("ncclCudaCallocDebug(void**, int)", "src/include/alloc.h", 9);
        assert!(is_of_nccl(&[library.clone(), program.clone()]) && is_of_nccl(&[linked, program.clone()]));
        assert!(!is_of_nccl(&[library.clone(), place("ncclMemAlloc", "/x/libnccl.so.2", 0), program.clone()]));
        assert!(!is_of_nccl(&[program, library]) && !is_of_nccl(&[]));
    }

    #[test]
    fn a_call_site_is_the_innermost_line_of_the_program() {
        let header = place("thrust::sort", "/usr/local/cuda/include/thrust/sort.h", 9);
        let stack = [header.clone(), place("step", "src/matrix.cu", 57), place("main", "src/main.cu", 3)];
        assert_eq!(call_site(&stack).as_deref(), Some("matrix.cu:57"));
        assert_eq!(call_site(&[header]).as_deref(), Some("sort.h:9"));
        assert_eq!(call_site(&[place("", "/bin/x", 0), place("f(int)", "/bin/x", 0)]).as_deref(), Some("f (x)"));
        assert_eq!(call_site(&[place("", "/bin/x", 0)]).as_deref(), Some("x"));
        assert_eq!(call_site(&[]), None);
    }
}
