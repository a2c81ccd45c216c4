//! Where there is no host memory behind reserved ranges of the simulated device: elsewhere than on Linux.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

#[derive(Debug)]
pub(super) enum Range {}

#[derive(Debug)]
pub(super) enum File {}

impl Range {
    pub(super) fn reserve(_bytes: u64) -> Option<Self> {
        None
    }

    pub(super) fn at(&self, _offset: u64) -> Option<NonNull<u8>> {
        match *self {}
    }

    pub(super) fn map(&self, _offset: u64, _file: &File) -> bool {
        match *self {}
    }

    pub(super) fn unmap(&self, _offset: u64, _bytes: u64) {
        match *self {}
    }
}

impl File {
    pub(super) fn new(_bytes: u64) -> Option<Self> {
        None
    }

    pub(super) fn import(_descriptor: &OwnedFd) -> Option<Self> {
        None
    }

    pub(super) fn bytes(&self) -> u64 {
        match *self {}
    }

    pub(super) fn descriptor(&self) -> Option<OwnedFd> {
        match *self {}
    }
}
