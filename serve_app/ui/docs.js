/** The API's description, shown by Swagger UI. Asks with the page's key, where one is needed. */
import { askJson, key, NoKeyError } from "./common/api.js";
import { byId, h } from "./common/dom.js";

/** @param {any} request  that Swagger UI is about to send */
function withKey(request) {
  const used = key();
  if (used) request.headers.Authorization = `Bearer ${used}`;
  return request;
}

try {
  const spec = await askJson("openapi.json");
  // @ts-ignore: vendor/swagger-ui.js defines it
  window.SwaggerUIBundle({ spec, dom_id: "#api", requestInterceptor: withKey, validatorUrl: null });
} catch (error) {
  const needed = error instanceof NoKeyError;
  const text = needed ? "This server needs an API key. Give it to the page, and come back: " : String(error);
  byId("api").replaceChildren(h("p", {}, text, ...(needed ? [h("a", { href: "./", textContent: "the page" })] : [])));
}
