"""Why a measured step took as long as it did: its lost seconds by cause, and what mending each would gain."""
