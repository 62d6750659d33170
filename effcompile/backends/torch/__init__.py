"""Stock torch: eager, Inductor, bf16 and int8 through oneDNN."""
