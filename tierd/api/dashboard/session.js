// The key of this tab. It lives in sessionStorage, which is this address's and port's alone, and is
// sent as a bearer token: a cookie would go to every port of the host.

const PLACE = "tierd-key";

export class Refused extends Error {}

export function key() {
  try {
    return sessionStorage.getItem(PLACE) ?? "";
  } catch {
    return kept;
  }
}

let kept = "";

function keep(value) {
  kept = value;
  try {
    sessionStorage.setItem(PLACE, value);
  } catch {
    // No storage: it holds until the page is loaded anew.
  }
}

// Exchange a code or a token for a key that only reads.
export async function enter(secret) {
  const answer = await fetch("/v1/session", {
    method: "POST",
    headers: { Authorization: `Bearer ${secret}` },
    cache: "no-store",
  });
  if (!answer.ok) throw new Refused(await detail(answer));
  keep((await answer.json()).key);
}

// The code of `tierd dashboard`, behind the #, used up here and taken out of the address.
export async function enterByAddress() {
  const code = new URLSearchParams(location.hash.slice(1)).get("code");
  if (!code) return;
  history.replaceState(null, "", location.pathname);
  await enter(code);
}

export function headers(more = {}) {
  const own = key();
  return own ? { ...more, Authorization: `Bearer ${own}` } : more;
}

export async function get(path, signal = AbortSignal.timeout(8000)) {
  const answer = await fetch(path, { headers: headers(), cache: "no-store", signal });
  if (answer.status === 401) throw new Refused(await detail(answer));
  if (!answer.ok) throw new Error(await detail(answer));
  return answer.json();
}

export async function detail(answer) {
  try {
    return (await answer.json()).detail || answer.statusText;
  } catch {
    return answer.statusText || `status ${answer.status}`;
  }
}
