"""One file per idea; each proposes choices and applies the plan."""
