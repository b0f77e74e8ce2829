// The page of two runs: its tables and its theme.

tables();
themes(() => {});
