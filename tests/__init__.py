"""steploop's tests: one file per module, deterministic, no sleeps; every time or ratio lives in bench/."""
