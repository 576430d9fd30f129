"""Checkpoints by topology: the shards of every rank on disk, in a folder named by TP, PP, EP and ETP, and back.

A folder appears under its name only once it is whole, and what was interrupted goes on where it stopped.
"""

from moeref.shards.files import ShardError
from moeref.shards.folder import ShardFolder, folder_name, save
from moeref.shards.join import join
from moeref.shards.split import split

__all__ = ["ShardError", "ShardFolder", "folder_name", "join", "save", "split"]
