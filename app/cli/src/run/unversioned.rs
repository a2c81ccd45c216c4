//! A shared library without code whose SONAME is `libcuda.so` and which needs `libcuda.so.1`.
//!
//! Some programs open the driver as `libcuda.so`, a name that the library between does not have. Loaded in front of the program,
//! this one answers to it, and symbols that are looked up in it are found in what it needs.

/// The machine of programs here, as ELF numbers it.
pub(super) const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

const NAME: &[u8] = b"libcuda.so\0";
const NEEDED: &[u8] = b"libcuda.so.1\0";

const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const PROGRAM_HEADERS: u64 = 3;
const PAGE: u64 = 0x10000;

/// The file.
pub(super) fn library() -> Vec<u8> {
    let strings: Vec<u8> = [&b"\0"[..], NAME, NEEDED].concat();
    // CAST: lengths of constants.
    let needed = 1 + NAME.len() as u64;
    let symbols = HEADER + PROGRAM_HEADERS * PROGRAM_HEADER;
    let hash = symbols + 24;
    let text = hash + 16;
    let dynamic = (text + strings.len() as u64).next_multiple_of(8);
    let entries: [(u64, u64); 8] = [
        (14, 1),                    // SONAME
        (1, needed),                // NEEDED
        (4, hash),                  // HASH
        (5, text),                  // STRTAB
        (6, symbols),               // SYMTAB
        (10, strings.len() as u64), // STRSZ
        (11, 24),                   // SYMENT
        (0, 0),                     // the end
    ];
    let dynamic_bytes = entries.len() as u64 * 16;
    let end = dynamic + dynamic_bytes;

    let mut out = Vec::new();
    out.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    put(&mut out, &[(2, 3), (2, MACHINE.into()), (4, 1), (8, 0), (8, HEADER), (8, 0), (4, 0)]);
    put(&mut out, &[(2, HEADER), (2, PROGRAM_HEADER), (2, PROGRAM_HEADERS), (2, 64), (2, 0), (2, 0)]);
    // Loaded as a whole; the dynamic linker writes into the dynamic section.
    put(&mut out, &[(4, 1), (4, 6), (8, 0), (8, 0), (8, 0), (8, end), (8, end), (8, PAGE)]);
    let place = [(8, dynamic); 3];
    put(&mut out, &[(4, 2), (4, 6)]);
    put(&mut out, &place);
    put(&mut out, &[(8, dynamic_bytes), (8, dynamic_bytes), (8, 8)]);
    // A stack without code.
    put(&mut out, &[(4, 0x6474_e551), (4, 6), (8, 0), (8, 0), (8, 0), (8, 0), (8, 0), (8, 16)]);
    // One symbol, the undefined one, and a hash table of one bucket for it.
    out.extend([0; 24]);
    put(&mut out, &[(4, 1), (4, 1), (4, 0), (4, 0)]);
    out.extend(strings);
    out.resize(usize::try_from(dynamic).unwrap_or_default(), 0);
    for (tag, value) in entries {
        put(&mut out, &[(8, tag), (8, value)]);
    }
    out
}

/// Appends numbers of some bytes each.
fn put(out: &mut Vec<u8>, numbers: &[(usize, u64)]) {
    for (bytes, number) in numbers {
        out.extend(&number.to_le_bytes()[..*bytes]);
    }
}
