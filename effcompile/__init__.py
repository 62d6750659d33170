"""effcompile: declare the budget; get the fastest plan that fits, with proof."""
