"""Values and tables of recorded results that pages quote; `lookup` finds them by name."""
