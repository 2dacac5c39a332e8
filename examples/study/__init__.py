"""Which terms of the quality objective change plans for the better, on models that no formula was tuned on."""
