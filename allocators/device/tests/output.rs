//! Files that users name: whole or not at all, and nothing replaced that is no regular file.

#![cfg(unix)]

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Barrier;
use tempfile::TempDir;
use vramlab_device::output::{
    self, Existing, OutputError, OutputFile, OutputFolder, OutputProblem, OwnFolder, check, remove_abandoned, write,
};

const BOTH: [Existing; 2] = [Existing::Refuse, Existing::Replace];

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The line with which writing there is refused, however often it is tried; the folder stays as it was.
fn refused(path: &Path, existing: Existing) -> String {
    let folder = path.parent().filter(|folder| folder.is_dir()).map(Path::to_owned);
    let before = folder.as_deref().map(names);
    let error = write(path, existing, "new").unwrap_err();
    assert!(error.problem.is_refusal(), "{error}");
    assert_eq!(check(path, existing).unwrap_err().to_string(), error.to_string());
    assert_eq!(folder.as_deref().map(names), before);
    let line = error.to_string();
    assert!(line.starts_with(&path.display().to_string()) && !line.contains('\n'), "{line}");
    line
}

/// Does this in a new process of the same test, prepared as the caller says: its output when it failed.
fn in_process(test: &str, folder: &Path, prepare: impl FnOnce(&mut Command)) -> Result<(), String> {
    // A user without rights may not reach the folder that it was built in.
    let program = folder.join("program");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let mut command = Command::new("sh");
    command.env("OUTPUT_FOLDER", folder).env("PROGRAM", &program).env("TEST", format!("output::{test}"));
    prepare(&mut command);
    let out = command.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    // A name that no test has is no failure to the harness.
    if out.status.success() && text.contains("1 passed") { Ok(()) } else { Err(text) }
}

/// The folder of a process that [`in_process`] started.
fn given_folder() -> Option<PathBuf> {
    std::env::var_os("OUTPUT_FOLDER").map(PathBuf::from)
}

#[test]
fn a_file_appears_when_it_is_whole() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("table.csv");
    let mut out = OutputFile::create(&path, Existing::Refuse).unwrap();
    out.write_all(&vec![b'x'; 1 << 20]).unwrap();
    let [part] = &names(folder.path())[..] else { panic!("one part was expected") };
    assert!(part.starts_with(".table.csv.") && part.ends_with(".part"), "{part}");
    out.finish().unwrap();
    assert_eq!(names(folder.path()), ["table.csv"]);
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    // This file has the permissions that programs usually give.
    let usual = folder.path().join("usual");
    fs::write(&usual, "").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode();
    assert_eq!(mode(&path), mode(&usual));
    // Less than was expected is no harm, and a name may be as long as any.
    let long = folder.path().join("n".repeat(255));
    let mut out = OutputFile::create(&long, Existing::Refuse).unwrap();
    out.expect(1 << 20).unwrap();
    out.write_all(b"three").unwrap();
    out.finish().unwrap();
    assert_eq!(fs::read(&long).unwrap(), b"three");
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old").unwrap();
    let mut out = OutputFile::create(&path, Existing::Replace).unwrap();
    out.write_all(b"new").unwrap();
    drop(out);
    assert_eq!(names(folder.path()), ["file"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn what_is_there_stays_or_is_replaced_as_the_caller_says() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, "old, and longer").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(refused(&path, Existing::Refuse).contains("already exists"));
    assert_eq!(fs::read(&path).unwrap(), b"old, and longer");
    // Neighbours with the names that a careless writer would use.
    let neighbours = ["file.part", ".file.part", "file.tmp"];
    neighbours.iter().for_each(|name| fs::write(folder.path().join(name), name).unwrap());
    write(&path, Existing::Replace, "new").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600, "what was private should stay so");
    for name in neighbours {
        assert_eq!(fs::read(folder.path().join(name)).unwrap(), name.as_bytes());
    }
    assert_eq!(names(folder.path()).len(), 4);
}

#[test]
fn what_comes_in_between_stays() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("file");
    let begun = |existing| {
        let mut out = OutputFile::create(&path, existing).unwrap();
        out.write_all(b"new").unwrap();
        out
    };
    let out = begun(Existing::Refuse);
    fs::write(&path, "another's").unwrap();
    assert!(matches!(out.finish().unwrap_err().problem, OutputProblem::Exists));
    assert_eq!(fs::read(&path).unwrap(), b"another's");

    let out = begun(Existing::Replace);
    fs::remove_file(&path).unwrap();
    symlink("elsewhere", &path).unwrap();
    assert!(matches!(out.finish().unwrap_err().problem, OutputProblem::Link(_)));
    fs::remove_file(&path).unwrap();

    let out = begun(Existing::Replace);
    fs::create_dir(&path).unwrap();
    assert!(matches!(out.finish().unwrap_err().problem, OutputProblem::Directory));
    assert_eq!(names(folder.path()), ["file"]);
}

#[test]
fn of_writers_of_one_file_one_has_it() {
    for there in [false, true] {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join("file");
        if there {
            fs::write(&path, "old").unwrap();
        }
        let mut first = OutputFile::create(&path, Existing::Replace).unwrap();
        first.write_all(b"first").unwrap();
        let second = OutputFile::create(&path, Existing::Replace);
        if there {
            // The file that is replaced is locked, so the second is refused before it works for nothing.
            first.finish().unwrap();
            assert!(matches!(second.unwrap_err().problem, OutputProblem::Taken));
        } else {
            first.finish().unwrap();
            let refused = second.unwrap().finish().unwrap_err();
            assert!(refused.problem.is_refusal() && matches!(refused.problem, OutputProblem::Taken), "{refused}");
        }
        assert_eq!(fs::read(&path).unwrap(), b"first");
        // One that comes later may replace it.
        write(&path, Existing::Replace, "later").unwrap();
        assert_eq!(names(folder.path()), ["file"]);
    }
}

#[test]
fn of_many_writers_at_once_one_has_it() {
    for round in 0..200 {
        let dir = TempDir::new().unwrap();
        let (folder, file, whole) = (dir.path().join("own"), dir.path().join("file"), dir.path().join("whole"));
        match round % 3 {
            0 => fs::create_dir(&folder).unwrap(),
            1 => fs::write(&file, "old").unwrap(),
            _ => {}
        }
        let begin = Barrier::new(4);
        let begun = Barrier::new(4);
        let each = |writer: usize| {
            let (folder, file, whole, begin, begun) = (&folder, &file, &whole, &begin, &begun);
            move || {
                begin.wait();
                let owns = OwnFolder::take(folder, "first").map(|(_, mut first)| write!(first, "{writer}").unwrap());
                let out = OutputFile::create(file, Existing::Replace);
                let part = OutputFolder::create(whole).unwrap();
                fs::write(part.part().join("who"), writer.to_string()).unwrap();
                begun.wait();
                let wrote = out.and_then(|out| out.fill(writer.to_string()));
                (owns.is_ok(), wrote.is_ok(), part.finish().is_ok())
            }
        };
        let won: Vec<(bool, bool, bool)> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4).map(|writer| scope.spawn(each(writer))).collect();
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        let only = |of: &dyn Fn(&(bool, bool, bool)) -> bool| {
            let who: Vec<usize> = (0..4).filter(|writer| of(&won[*writer])).collect();
            assert_eq!(who.len(), 1, "round {round}: {won:?}");
            who[0].to_string()
        };
        assert_eq!(fs::read_to_string(folder.join("first")).unwrap(), only(&|won| won.0));
        assert_eq!(fs::read_to_string(&file).unwrap(), only(&|won| won.1));
        assert_eq!(fs::read_to_string(whole.join("who")).unwrap(), only(&|won| won.2));
        assert_eq!(names(dir.path()), ["file", "own", "whole"]);
    }
}

#[test]
fn parts_of_killed_programs_are_removed_and_no_others() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in [".file.aaaaaaaaaa.part", ".other.aaaaaaaaaa.part", ".file.part", ".file.a.aaaaaaaaaa.part", "file"] {
        fs::write(at(name), "left").unwrap();
    }
    fs::create_dir(at(".file.bbbbbbbbbb.part")).unwrap();
    fs::write(at(".file.bbbbbbbbbb.part/inside"), "left").unwrap();
    symlink(at("file"), at(".file.cccccccccc.part")).unwrap();
    let before = names(dir.path());
    let (mut file, folder) =
        (OutputFile::create(&at("file"), Existing::Replace).unwrap(), OutputFolder::create(&at("file")).unwrap());
    fs::write(folder.part().join("inside"), "new").unwrap();
    remove_abandoned(&at("file"));
    let removed = [".file.aaaaaaaaaa.part", ".file.bbbbbbbbbb.part"];
    assert!(folder.part().join("inside").is_file());
    drop(folder);
    file.write_all(b"new").unwrap();
    file.finish().unwrap();
    assert_eq!(fs::read(at("file")).unwrap(), b"new");
    let left: Vec<String> = before.into_iter().filter(|name| !removed.contains(&&**name)).collect();
    assert_eq!(names(dir.path()), left);
}

#[test]
fn no_part_is_removed_while_it_is_written() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("file");
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                remove_abandoned(&path);
            }
        });
        for round in 0..500 {
            let (out, folder) = (OutputFile::create(&path, Existing::Refuse), OutputFolder::create(&path));
            let (out, folder) = (out.unwrap(), folder.unwrap());
            fs::write(folder.part().join("inside"), "").unwrap();
            drop(folder);
            out.fill(round.to_string()).unwrap();
            fs::remove_file(&path).unwrap();
        }
        over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_folder_that_is_given_back_goes_as_it_came() {
    let dir = TempDir::new().unwrap();
    let (new, there) = (dir.path().join("a/new"), dir.path().join("there"));
    fs::create_dir(&there).unwrap();
    for path in [&new, &there] {
        let (own, _) = OwnFolder::take(path, "first").unwrap();
        assert_eq!(OwnFolder::take(path, "first").unwrap_err().kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!(names(path), ["first"], "a loser takes nothing away");
        own.give_back();
    }
    assert!(!new.exists());
    assert!(names(&there).is_empty());
    // One that holds something is nobody's to take.
    fs::write(there.join("mine"), "").unwrap();
    assert!(OwnFolder::take(&there, "first").is_err() && OwnFolder::take(&there.join("mine"), "first").is_err());
    assert_eq!(names(&there), ["mine"]);
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
    fs::create_dir(dir.path().join("usual")).unwrap();
    let complete = OutputFolder::create(&dir.path().join("whole")).unwrap();
    fs::write(complete.part().join("file"), "").unwrap();
    complete.finish().unwrap();
    assert_eq!(mode(&dir.path().join("whole")), mode(&dir.path().join("usual")));
    drop(OutputFolder::create(&dir.path().join("dropped")).unwrap());
    assert_eq!(names(dir.path()), ["a", "there", "usual", "whole"]);
}

#[test]
fn links_are_never_replaced_nor_followed() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("target"), "old").unwrap();
    fs::create_dir(at("folder")).unwrap();
    for (name, target) in
        [("link", "target"), ("dangling", "absent"), ("to_folder", "folder"), ("loop", "loop"), ("null", "/dev/null")]
    {
        symlink(target, at(name)).unwrap();
        for existing in BOTH {
            let line = refused(&at(name), existing);
            assert!(line.contains(&format!("is a symbolic link to {target}; name the file itself")), "{line}");
        }
        assert_eq!(fs::read_link(at(name)).unwrap(), Path::new(target));
    }
    assert_eq!(fs::read(at("target")).unwrap(), b"old");
    assert!(!at("absent").exists());
    // A folder on the way may be a link.
    write(&at("to_folder").join("file"), Existing::Refuse, "new").unwrap();
    assert_eq!(names(&at("folder")), ["file"]);
}

#[test]
fn what_is_no_regular_file_stays() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    let _listener = UnixListener::bind(at("socket")).unwrap();
    assert!(Command::new("mkfifo").arg(at("pipe")).status().unwrap().success());
    let mut cases = vec![("folder", "is a directory"), ("pipe", "is a pipe"), ("socket", "is a socket")];
    // A device node made for this test, where the user may make one.
    let made = Command::new("mknod").arg(at("null")).args(["c", "1", "3"]).output().unwrap().status.success();
    if made {
        cases.push(("null", "is a device"));
    }
    for (name, message) in cases {
        for existing in BOTH {
            let line = refused(&at(name), existing);
            assert!(line.contains(message) && line.contains("name a file"), "{line}");
        }
        assert!(!fs::symlink_metadata(at(name)).unwrap().file_type().is_file(), "{name}");
    }
    // Not written to, whatever happens: as root that would be the end of it.
    let error = check(Path::new("/dev/null"), Existing::Replace).unwrap_err();
    assert!(error.to_string().contains("/dev/null: is a device"), "{error}");
    assert!(fs::symlink_metadata("/dev/null").unwrap().file_type().is_char_device());
    for stream in ["-", "/dev/stdout", "/dev/stderr", "/dev/fd/1", "/proc/self/fd/2"] {
        let error = check(Path::new(stream), Existing::Replace).unwrap_err();
        assert!(error.to_string().contains("is a stream"), "{error}");
    }
}

#[test]
fn a_name_that_cannot_be_is_refused_at_once() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("file"), "").unwrap();
    for (path, message) in [
        (PathBuf::new(), "names no file"),
        (at("absent/file"), "there is no folder"),
        (at("absent/"), "is a directory"),
        (at(".."), "is a directory"),
        (at("file/x"), "cannot be made"),
        (at(&"n".repeat(256)), "cannot be made"),
        (folder.path().join(std::ffi::OsStr::from_bytes(b"a\0b")), "cannot be made"),
    ] {
        let error = write(&path, Existing::Replace, "new").unwrap_err();
        assert!(error.problem.is_refusal() && error.to_string().contains(message), "{path:?}: {error}");
    }
    assert_eq!(names(folder.path()), ["file"]);
}

/// The errors for a user without rights.
#[test]
fn folders_and_files_that_are_read_only_stay_so() {
    if let Some(folder) = given_folder() {
        for existing in BOTH {
            let line = refused(&folder.join("closed/new"), existing);
            assert!(line.contains("Permission denied") && line.contains("name another file"), "{line}");
        }
        assert!(refused(&folder.join("closed/file"), Existing::Refuse).contains("already exists"));
        assert!(refused(&folder.join("closed/file"), Existing::Replace).contains("Permission denied"));
        // The folder would let it be replaced.
        assert!(refused(&folder.join("open/kept"), Existing::Replace).contains("Permission denied"));
        write(&folder.join("open/new"), Existing::Refuse, "new").unwrap();
        return;
    }
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    let mode = |name: &str, mode| fs::set_permissions(at(name), fs::Permissions::from_mode(mode)).unwrap();
    for name in ["closed", "open"] {
        fs::create_dir(at(name)).unwrap();
    }
    for name in ["closed/file", "open/kept"] {
        fs::write(at(name), "old").unwrap();
        mode(name, 0o444);
    }
    mode("closed", 0o555);
    mode("open", 0o777);
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let root = fs::metadata(folder.path()).unwrap().uid() == 0;
    let output = in_process("folders_and_files_that_are_read_only_stay_so", folder.path(), |command| {
        command.args(["-c", "exec \"$PROGRAM\" --exact \"$TEST\""]);
        if root {
            const NOBODY: u32 = 65534;
            command.uid(NOBODY).gid(NOBODY);
        }
    });
    mode("closed", 0o755);
    output.unwrap();
    assert_eq!(names(&at("open")), ["kept", "new"]);
    assert_eq!(fs::read(at("open/kept")).unwrap(), b"old");
}

/// A process that ends removes a directory to which other threads still add files.
#[test]
fn a_directory_goes_while_files_are_added() {
    const FILE_BYTES: usize = 1 << 16;
    if let Some(folder) = given_folder() {
        let out = OutputFolder::create(&folder.join("out/whole")).unwrap();
        let part = out.part().to_owned();
        // As what unpacks an archive: a file after another, with their parents, until the process ends.
        let add = move |thread: usize| {
            for number in 0.. {
                let path = part.join(format!("{thread}/{number}"));
                output::add(|| {
                    fs::create_dir_all(path.parent().unwrap()).unwrap();
                    fs::write(&path, [0; FILE_BYTES]).unwrap();
                });
            }
        };
        for thread in 0..4 {
            std::thread::spawn({
                let add = add.clone();
                move || add(thread)
            });
        }
        while names(out.part()).len() < 4 {
            std::thread::yield_now();
        }
        output::discard_unfinished();
        assert!(names(&folder.join("out")).is_empty());
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    in_process("a_directory_goes_while_files_are_added", folder.path(), |command| {
        command.args(["-c", "exec \"$PROGRAM\" --exact \"$TEST\""]);
    })
    .unwrap();
    assert!(names(&folder.path().join("out")).is_empty());
}

/// Files in a folder that has room for less than these need.
fn fails_for_room(folder: &Path, needed: usize) -> Vec<OutputError> {
    let path = folder.join("file");
    // Known ahead.
    let known = write(&path, Existing::Refuse, vec![b'x'; needed]).unwrap_err();
    // Found out on the way.
    let mut out = OutputFile::create(&path, Existing::Refuse).unwrap();
    let met = (0..needed / 1000).map(|_| out.write_all(&[b'x'; 1000])).find_map(Result::err);
    let met = out.failed(met.unwrap());
    drop(out);
    for error in [&known, &met] {
        assert!(matches!(error.problem, OutputProblem::NoRoom(_)) && !error.problem.is_refusal(), "{error}");
    }
    assert_eq!(names(folder), Vec::<String>::new());
    // Something smaller still goes.
    write(&path, Existing::Refuse, "small").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"small");
    fs::remove_file(&path).unwrap();
    vec![known, met]
}

#[test]
fn a_limit_on_the_length_of_files_is_told_and_nothing_is_left() {
    if let Some(folder) = given_folder() {
        let [known, met] = &fails_for_room(&folder.join("out"), 4 << 20)[..] else { panic!("two ways to fail") };
        let [known, met] = [known.to_string(), met.to_string()];
        assert!(known.contains("File too large") && known.contains("it needs 4 MiB; raise the limit"), "{known}");
        assert!(met.contains("it needs at least "), "{met}");
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    in_process("a_limit_on_the_length_of_files_is_told_and_nothing_is_left", folder.path(), |command| {
        // Without the trap the limit ends the process.
        command.args(["-c", "trap '' XFSZ; ulimit -f 2048; exec \"$PROGRAM\" --exact \"$TEST\""]);
    })
    .unwrap();
}

#[test]
#[ignore = "needs the right to mount a file system; run with --ignored"]
fn a_full_disk_is_told_and_nothing_is_left() {
    if let Some(folder) = given_folder() {
        let [known, met] = &fails_for_room(&folder.join("out"), 4 << 20)[..] else { panic!("two ways to fail") };
        let [known, met] = [known.to_string(), met.to_string()];
        assert!(known.contains("No space left on device"), "{known}");
        assert!(known.contains("it needs 4 MiB, and there is room for 1 MiB; make room there"), "{known}");
        assert!(met.contains("it needs at least ") && met.contains("make room there"), "{met}");
        return;
    }
    let folder = TempDir::new().unwrap();
    fs::create_dir(folder.path().join("out")).unwrap();
    const NOT_ALLOWED: &str = "no file system of one's own here";
    let output = in_process("a_full_disk_is_told_and_nothing_is_left", folder.path(), |command| {
        let mount = "mount -t tmpfs -o size=1m tmpfs \"$OUTPUT_FOLDER/out\"";
        let script =
            format!("{mount} || {{ echo {NOT_ALLOWED:?}; exit 1; }}; exec \"$PROGRAM\" --ignored --exact \"$TEST\"");
        command.env("SCRIPT", script);
        let unshare = "unshare --mount --map-root-user true || { echo \"$0\"; exit 1; }; \
                       exec unshare --mount --map-root-user sh -c \"$SCRIPT\"";
        command.args(["-c", unshare, NOT_ALLOWED]);
    });
    output.unwrap();
}
