// The page of a store, whose runs are links.

tables();
themes(() => {});
