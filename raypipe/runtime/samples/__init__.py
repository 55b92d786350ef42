"""Documents streamed to devices: Ray Data tokenises, one actor orders, each device takes its rows."""
