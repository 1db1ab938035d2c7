// pm2 start deploy/pm2/ecosystem.config.js --only iota-store,iota-validator      (or: --only iota-miner)
// Run from the checkout, after scripts/install.
const run = (name, args) => ({
  name,
  script: ".venv/bin/iota",
  interpreter: "none",
  args,
  kill_timeout: 60000, // SIGTERM ends it in order: leases are handed back
  max_restarts: 1000,
  exp_backoff_restart_delay: 1000,
});

module.exports = {
  apps: [
    run("iota-store", "store serve"),
    run("iota-validator", "validator --netuid 1 --subtensor.network local --wallet.name validator --wallet.hotkey default --ops.port 9109"),
    run("iota-miner", "miner --netuid 1 --subtensor.network local --wallet.name miner --wallet.hotkey default"),
  ],
};
