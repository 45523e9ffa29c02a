// What the scripts for Node have in common: one line of JSON for the outcome of each check, as checks.py writes it.

// Runs `checks`, functions by name, one after the other. An exception is a failed check.
export async function runAll(checks) {
  for (const [check, run] of Object.entries(checks)) {
    let error = "";
    try {
      await run();
    } catch (exception) {
      error = `${exception.name}: ${exception.message}`.slice(0, 500);
    }
    console.log(JSON.stringify({ check, error }));
  }
}
