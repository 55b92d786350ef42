"""Why a run's steps take as long as they do, read from its directory and shown: JSON, table, heat map, Gantt, HTML."""
