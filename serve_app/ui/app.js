/** Starts the page: views, colours, the key. */
import * as api from "./common/api.js";
import { ChatPage } from "./chat/chat.js";
import { ComparePage } from "./chat/compare.js";
import { announce, byId } from "./common/dom.js";
import { LivePage } from "./live/live.js";
import { read, write } from "./common/store.js";
import { UsagePage } from "./usage/usage.js";

const THEMES = ["auto", "light", "dark"];

function startColours() {
  const button = byId("theme");
  let theme = read("corral.theme", "auto");
  const use = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = theme[0].toUpperCase() + theme.slice(1);
    button.setAttribute("aria-label", `Colours: ${theme}`);
  };
  button.onclick = () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    write("corral.theme", theme);
    use();
  };
  use();
}

function startKey() {
  const dialog = byId("key-dialog");
  const showButton = () => (byId("key-button").hidden = !api.key());
  /** @type {Promise<void> | null} */
  let asking = null;

  /** One dialog for all that wait for a key. @param {string} why */
  function ask(why) {
    asking ??= new Promise((resolve, reject) => {
      byId("key-why").textContent = why || "This server requires an API key.";
      byId("key").value = "";
      byId("key-form").onsubmit = () => {
        api.setKey(byId("key").value.trim(), byId("key-remember").checked);
        showButton();
        resolve(undefined);
      };
      dialog.onclose = () => {
        asking = null;
        reject(new api.NoKeyError("This server does not answer without an API key."));
      };
      dialog.showModal();
    });
    return asking;
  }

  api.door.ask = ask;
  byId("key-cancel").onclick = () => dialog.close();
  byId("key-button").onclick = () => ask("Enter another key. To forget the present one, leave the field empty.").catch(() => {});
  showButton();
}

/** @param {Record<string, {show: () => void, hide: () => void}>} views */
function startViews(views) {
  let shown = "";
  const show = () => {
    const wanted = location.hash.slice(2); // "#/chat": not the id of an element, which browsers would focus
    const name = wanted in views ? wanted : shown || "chat";
    if (name === shown) return;
    if (shown) views[shown].hide();
    for (const other of Object.keys(views)) byId(other).hidden = other !== name;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.getAttribute("href") === `#/${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    shown = name;
    views[name].show();
  };
  addEventListener("hashchange", show);
  show();
}

startColours();
startKey();
startViews({ chat: new ChatPage(), compare: new ComparePage(), live: new LivePage(), usage: new UsagePage() });
document.documentElement.dataset.ready = "yes";
addEventListener("offline", () => announce("You are offline."));
